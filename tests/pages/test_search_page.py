"""The page of a search as a file: its structure, what it says without a script, hostile texts, its size."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pages_kit as kit
import pytest
from html_kit import Page
from tilebeam import SearchResult, Trajectory, VoteResult
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.pages import document
from tilebeam.pages.markup import Html, join, tag
from tilebeam.pages.methods import method_title
from tilebeam.pages.search_page import one_line, search_page
from tilebeam.search import algorithms
from tilebeam.search.contract import Pruned

MADE: dict[str, tuple[str, SearchResult]] = {
    "vote": ("self-consistency", kit.vote(12)),
    "best": ("best-of-n", kit.best_of(5)),
    "beam": ("beam", kit.beams(8, 4, 4)),
    "dvts": ("dvts", kit.beams(8, 4, 4, dvts=True)),
    "adaptive": ("adaptive", kit.adaptive(9)),
    "one": ("best-of-n", kit.best_of(1)),
}
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]></pre><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)'",
    "line\u2028separator\u2029end",
    "$title ${policy} $$ {data}",
    "&lt;b&gt; &amp; &#60;",
    "nul \0 bell \a escape \x1b lone \ud800 surrogate",
    "\u202eright to left\u202c",
    "\\u003c/script\\u003e",
    "\n\nblank lines first",
    "",
)


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_well_formed_and_complete(name: str) -> None:
    method, result = MADE[name]
    page = Page(search_page(method, [result], None, {"Model": "m.gguf"}))
    assert page.named("html") == [{"lang": "en"}]
    assert len(page.named("h1")) == 1
    for i, candidate in enumerate(result.candidates):
        (row,) = (a for a in page.named("tr") if a.get("id") == f"q0-c{i}")
        assert (row.get("class") == "best") == (i == result.best_index)
        whole = "".join(page.texts["pre"])
        assert all(step.rstrip("\n") in whole for step in result.trajectories[i].steps) or candidate.text in whole
    assert len(page.named("details")) == len(result.candidates)
    assert page.texts["dd"][:2] == [str(len(result.candidates)), str(result.budget)]
    assert "m.gguf" in page.texts["dd"]
    trees = [a for a in page.named("div") if a.get("role") == "tree"]
    assert bool(trees) == any(t.scores for t in result.trajectories) == bool(page.data[0])
    if hasattr(result, "votes"):
        assert page.texts["p"][1] == result.answer
        shown = [a for a in page.texts["th"] if a in result.votes]
        assert shown == list(result.votes)


def paths(nodes: list[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Of each node of a page's tree: the texts that lead to it."""
    found: dict[int, tuple[str, ...]] = {-1: ()}
    for i, node in enumerate(nodes):
        assert node["p"] < i
        found[i] = () if node.get("head") else (*found[node["p"]], node["t"])
    return found


@pytest.mark.parametrize("name", ["beam", "dvts"])
def test_the_tree_has_every_beam_and_what_became_of_it(name: str) -> None:
    method, result = MADE[name]
    (nodes,) = Page(search_page(method, [result])).data
    where = paths(nodes)
    ends = {note[2]: i for i, node in enumerate(nodes) for note in node.get("n", ()) if note[2] >= 0}
    for i, path in enumerate(result.trajectories):
        assert where[ends[i]] == path.steps
        assert nodes[ends[i]]["s"] == path.scores[-1]
    dropped = [note for node in nodes for note in node.get("n", ()) if note[1].startswith("dropped")]
    assert len(dropped) == len(result.pruned)
    for pruned in result.pruned:
        at = [i for i, steps in where.items() if steps == pruned.steps]
        assert any(f"dropped in round {pruned.round}: {pruned.score:.3f}" in n[1] for i in at for n in nodes[i]["n"])
    best = result.trajectories[result.best_index].steps
    lit = [where[i] for i, node in enumerate(nodes) if node["b"] and not node.get("head")]
    assert lit == [best[: k + 1] for k in range(len(best))]
    assert sum(1 for node in nodes if node.get("head")) == (2 if name == "dvts" else 0)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_of_the_model_is_never_markup(text: str) -> None:
    calm = {name: Page(search_page(method, [result])) for name, (method, result) in MADE.items()}
    for name, (method, made) in MADE.items():
        given = replace(
            made,
            prompt=text,
            candidates=[replace(c, text=text) for c in made.candidates],
            trajectories=[replace(t, steps=(*t.steps[:-1], text)) for t in made.trajectories],
            pruned=[replace(p, steps=(*p.steps[:-1], text)) for p in made.pruned],
        )
        if isinstance(given, VoteResult):
            given.votes = {text + a: w for a, w in given.votes.items()}
            given.answers = [None if a is None else text + a for a in given.answers]
            given.answer = VotedAnswer(text + (given.answer or ""))
        source = search_page(method, [given], None, {text: text})
        assert source.count("</script>") == 2
        assert "\0" not in source
        source.encode("utf-8")
        page = Page(source)
        ours = [t for t, _ in calm[name].elements if t not in ("dt", "dd", "div")]
        assert [t for t, _ in page.elements if t not in ("dt", "dd", "div")] == ours
        known = text.replace("\0", "\ufffd").replace("\ud800", "?")
        assert known in page.texts["pre"][0]
        data = re.search(r'<script type="application/json" id="data">(.*)</script>\n<script>', source, re.DOTALL)
        assert data is not None
        assert not set(data[1]) & set("<>&\u2028\u2029")


def test_256_candidates_stay_small() -> None:
    script = len(search_page("best-of-n", [kit.best_of(1)]))  # and its style
    assert script < 280_000
    assert len(search_page("self-consistency", [kit.vote(256)])) < script + 280_000
    beams = kit.beams(256)
    assert len(beams.pruned) > 900
    assert len(search_page("beam", [beams])) < script + 680_000


def test_a_long_candidate_is_whole_and_stands_once() -> None:
    long = "<word> & " * 120_000
    result = kit.best_of(3)
    result.candidates[1] = replace(result.candidates[1], text=long)
    result.trajectories[1] = Trajectory((long,))
    result.best_index = 0
    source = search_page("best-of-n", [result])
    assert long in Page(source).texts["pre"]
    assert len(source) < 2.5 * len(long)


def test_many_trees_and_rounds() -> None:
    """The same of trees and rounds: all beams are looked at a few times, not once for each tree."""

    class Beams(list[Pruned]):
        passes = 0

        def __iter__(self) -> Iterator[Pruned]:
            self.passes += 1
            return super().__iter__()

    n = 1000
    result = kit.beams(8, 4, 3, dvts=True)
    result.pruned = beams = Beams(replace(result.pruned[0], tree=i, round=i + 1) for i in range(n))
    page = Page(source := search_page("dvts", [result]))
    assert sum(1 for node in page.data[0] if node.get("head")) == n
    assert source.count('<th scope="row" class="n">') == n + len(result.candidates)
    assert beams.passes < 5


def test_a_step_that_texts_share_has_the_score_of_the_chosen_one() -> None:
    """Texts can be equal and their scores not: they differ in tokens, or one was rated by what it led to."""
    result = kit.beams(8, 4, 3)
    steps = ("a\n", "b\n")
    result.trajectories[0] = Trajectory(steps, (0.1, 0.2))
    result.trajectories[1] = Trajectory(steps, (0.7, 0.9))
    result.trajectories[2] = Trajectory(("other\n",), (0.4,))
    result.best_index = 1
    result.pruned = [replace(result.pruned[0], steps=steps, scores=(0.3, 0.25), score=0.25)]
    result.pruned += [replace(result.pruned[0], steps=("other\n",), scores=(0.05,), score=0.05)]
    (nodes,) = Page(search_page("beam", [result])).data
    assert {node["t"]: node["s"] for node in nodes if node["t"] in (*steps, "other\n")} == {
        "a\n": 0.7,
        "b\n": 0.9,
        "other\n": 0.4,
    }
    (shared,) = (node for node in nodes if node["t"] == "b\n")
    starts = ("chosen: candidate 1", "candidate 0", "dropped in round 1: 0.250")
    assert all(note[1].startswith(start) for note, start in zip(shared["n"], starts, strict=True))


def test_tokens_of_dropped_beams_count_once() -> None:
    """Of each beam those of its last step: beams share their beginnings with others."""
    result = kit.beams(8, 4, 3)
    cells = Page(search_page("beam", [result])).texts["td"]
    for round in (1, 2):
        died = [p for p in result.pruned if p.round == round]
        bars = f"{min(p.bar for p in died):.3f}"
        assert cells[cells.index(bars) + 1] == str(14 * len(died))


def test_every_method_has_a_title() -> None:
    """Aliases have that of their method: requests and results call methods by either."""
    for name in algorithms.names():
        assert method_title(name) != name
        assert f"<h1>{method_title(name)}</h1>" in search_page(name, [kit.best_of(2)])
    assert method_title("vote") == method_title("self-consistency") == "Vote"
    assert method_title("<mine>") == "<mine>"


def test_several_prompts_have_contents() -> None:
    page = Page(search_page("self-consistency", [kit.vote(3), kit.vote(4)], ["first <question>", "second"]))
    assert page.texts["a"] == ["first <question>", "second"]
    assert [a["id"] for a in page.named("h2") if "id" in a] == ["q0", "q1"]
    assert page.texts["h2"] == ["Prompts", "Prompt 1", "Prompt 2"]


def test_scores_without_a_number() -> None:
    result = kit.best_of(3)
    result.scores = [float("-inf"), 1.0, float("nan")]
    result.best_index = 1
    page = Page(search_page("best-of-n", [result]))
    assert page.texts["td"].count("–") == 2


def test_the_policy_allows_the_page_itself_only() -> None:
    source = search_page("self-consistency", [kit.vote(3)])
    page = Page(source)
    (policy,) = (a["content"] for a in page.named("meta") if a.get("http-equiv"))
    assert policy == document.policy("search")
    for kind, text in (("script", page.texts["script"][1]), ("style", page.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_only_made_markup_is_markup() -> None:
    assert tag("p", "<b>", Html("<i></i>"), ["&", None, 1.5], class_='"x"', hidden=True, title=None) == (
        '<p class="&quot;x&quot;" hidden>&lt;b&gt;<i></i>&amp;1.5</p>'
    )
    assert join("a<", tag("b", "c")) == "a&lt;<b>c</b>"
    assert tag("pre", "\na") == "<pre>\n\na</pre>"
    assert tag("p", "\na") == "<p>\na</p>"
    assert one_line("a\n b  c" + "d" * 9, 8) == "a b cdd…"
