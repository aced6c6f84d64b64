"""The page of a search as a file: its structure, what it says without a script, hostile texts, its size."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
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
    assert page.texts["dd"][:2] == [str(len(result.candidates)), str(result.budget)]
    assert "m.gguf" in page.texts["dd"]
    trees = [a for a in page.named("div") if a.get("class") == "tree"]
    assert bool(trees) == any(t.scores for t in result.trajectories)
    assert trees or len(page.named("details")) == len(result.candidates)
    if hasattr(result, "votes"):
        assert page.texts["p"][1] == result.answer
        shown = [a for a in page.texts["th"] if a in result.votes]
        assert shown == list(result.votes)


class Tree(HTMLParser):
    """The rows of a page's tree, each with the steps that lead to it: those of one branch stand below each other, and
    what it forks into is within it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self._above: list[tuple[str, ...]] = []  # of the elements of branches that are open
        self._path: tuple[str, ...] = ()
        self._span = ""
        self.feed(re.search(r'<div class="tree".*?</section>', source, re.DOTALL)[0])  # type: ignore[index]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes, of = (dict(attrs).get("class") or "").split(), dict(attrs)
        if tag == "details":
            self._above.append(self._path)
        elif "step" in classes:
            self.rows.append(
                {"fates": [], "best": "best" in classes, "head": "head" in classes, "said": "", "score": ""}
            )
        elif "fate" in classes:
            self.rows[-1]["fates"].append(["", of.get("href")])
            self._span = "fate"
        elif tag == "span":
            self._span = classes[0]

    def handle_data(self, data: str) -> None:
        if self._span == "fate":
            self.rows[-1]["fates"][-1][0] += data
        elif self._span in ("said", "score"):
            self.rows[-1][self._span] += data

    def handle_endtag(self, tag: str) -> None:
        row, self._span = self.rows[-1], ""
        if tag == "details":
            self._path = self._above.pop()
        elif tag in ("summary", "div") and "path" not in row:
            self._path = row["path"] = self._path if row["head"] else (*self._path, row["said"])


def plain(steps: Sequence[str]) -> tuple[str, ...]:
    return tuple(step.rstrip("\n") for step in steps)


@pytest.mark.parametrize("name", ["beam", "dvts"])
def test_the_tree_has_every_beam_and_what_became_of_it(name: str) -> None:
    method, result = MADE[name]
    rows = Tree(search_page(method, [result])).rows
    ends = {href: row for row in rows for _, href in row["fates"] if href}
    for i, path in enumerate(result.trajectories):
        assert ends[f"#q0-c{i}"]["path"] == plain(path.steps)
        assert ends[f"#q0-c{i}"]["score"] == f"{path.scores[-1]:.3f}"
    assert sum(said.startswith("dropped") for row in rows for said, _ in row["fates"]) == len(result.pruned)
    for pruned in result.pruned:
        said = [said for row in rows if row["path"] == plain(pruned.steps) for said, _ in row["fates"]]
        assert any(f"dropped in round {pruned.round}: {pruned.score:.3f}" in one for one in said)
    best = plain(result.trajectories[result.best_index].steps)
    lit = [row["path"] for row in rows if row["best"] and not row["head"]]
    assert lit == [best[: k + 1] for k in range(len(best))]
    assert sum(row["head"] for row in rows) == (2 if name == "dvts" else 0)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_of_the_model_is_never_markup(text: str) -> None:
    def page_of(method: str, made: SearchResult, text: str) -> str:
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
        return search_page(method, [given], None, {text: text})

    for method, made in MADE.values():
        source, calm = page_of(method, made, text), Page(page_of(method, made, "calm"))
        assert source.count("</script>") == 2
        assert "\0" not in source
        source.encode("utf-8")
        page = Page(source)
        assert [t for t, _ in page.elements] == [t for t, _ in calm.elements]
        known = text.replace("\0", "\ufffd").replace("\ud800", "?")
        assert known in page.texts["pre"][0]


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
    source = search_page("dvts", [result])
    assert sum(row["head"] for row in Tree(source).rows) == n
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
    rows = {row["said"]: row for row in Tree(search_page("beam", [result])).rows}
    assert {said: rows[said]["score"] for said in ("a", "b", "other")} == {"a": "0.700", "b": "0.900", "other": "0.400"}
    starts = ("chosen: candidate 1", "candidate 0", "dropped in round 1: 0.250")
    assert all(said.startswith(start) for (said, _), start in zip(rows["b"]["fates"], starts, strict=True))


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
