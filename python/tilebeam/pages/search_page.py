"""The page of a search: the answer, what it cost, the votes, the tree of steps and every candidate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tilebeam.outputs import CompletionOutput
from tilebeam.pages.document import document, facts, number
from tilebeam.pages.markup import Html, join, row, table, tag
from tilebeam.pages.methods import method_title
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.beam import StepResult
from tilebeam.search.contract import Pruned, SearchResult, VoteResult
from tilebeam.search.limits import standings, voters
from tilebeam.search.tree import StepNode, step_tree, step_trees

_ENDS = {"stop": "ended", "length": "cut"}
_PREVIEW = 160  # characters of a candidate in its row
_FEW = 60  # a tree of so many steps is shown whole


def search_page(
    method: str,
    results: Sequence[SearchResult],
    questions: Sequence[str] | None = None,
    details: Mapping[str, object] | None = None,
) -> str:
    """Write an HTML file that shows results.

    Args:
        method: the algorithm's name.
        results: one for each prompt.
        questions: what to show as the prompts; by default the prompts as the model read them.
        details: names and values to show besides, such as the model.
    """
    name = method_title(method)
    asked = list(questions) if questions is not None else [r.prompt for r in results]
    several = len(results) > 1
    headings = [f"Prompt {i + 1}" if several else "Prompt" for i in range(len(results))]
    sections = [_section(i, headings[i], method, r, asked[i], details or {}) for i, r in enumerate(results)]
    links = [tag("li", tag("a", one_line(q, 100) or "(empty)", href=f"#q{i}")) for i, q in enumerate(asked)]
    contents = tag("nav", tag("h2", "Prompts"), tag("ol", links), aria_label="Prompts") if several else None
    header = tag("header", tag("p", "Tilebeam", class_="brand"), tag("h1", name))
    body = join(header, tag("main", contents, sections))
    return document(f"{name} - {one_line(asked[0], 60) if asked else 'no prompts'}", "search", body)


def one_line(said: str, limit: int) -> str:
    """Cut a text to its beginning, in one line."""
    flat = " ".join(said[: 8 * limit].split())
    return flat if len(flat) <= limit and len(said) <= 8 * limit else flat[: limit - 1].rstrip() + "…"


def _section(
    i: int, heading: str, method: str, result: SearchResult, asked: str, details: Mapping[str, object]
) -> Html:
    """Show all of one prompt's result."""
    by_steps = any(t.scores for t in result.trajectories)
    return tag(
        "article",
        tag("h2", heading, id=f"q{i}"),
        tag("pre", asked, class_="prompt", tabindex=0),
        _answer(result),
        facts(_figures(result, details)),
        _votes(result) if isinstance(result, VoteResult) else None,
        _steps(i, method, result) if by_steps else None,
        _candidates(i, result),
        aria_labelledby=f"q{i}",
    )


def _answer(result: SearchResult) -> Html:
    """Show what was chosen, and why."""
    chosen = result.best
    headline: Html | None = None
    reason = f"Candidate {result.best_index}, score {number(result.scores[result.best_index])}"
    if isinstance(result, VoteResult):
        headline = tag(
            "p", result.answer if result.answer is not None else "No candidate has an answer.", class_="answer"
        )
        winning = sum(a is not None and a == result.answer for a in _ballots(result))
        reason = f"{winning} of {len(result.candidates)} candidates; shown is candidate {result.best_index}"
    return tag(
        "section",
        tag("h3", "Answer"),
        headline,
        tag("pre", chosen.text or "(empty)", class_="text", tabindex=0),
        tag("p", f"{reason}, {_ENDS[chosen.finish_reason]}.", class_="note"),
        class_="card",
    )


def _figures(result: SearchResult, details: Mapping[str, object]) -> dict[str, object]:
    usage = result.usage
    cached = f" ({usage.cached_tokens:,} cached)" if usage.cached_tokens else ""
    scoring = f" ({usage.scoring_seconds:.2f} scoring)" if usage.scoring_seconds >= 0.005 else ""
    shown: dict[str, object] = {
        "Candidates": f"{len(result.candidates):,}",
        "Budget": f"{result.budget:,}",
        "Tokens sampled": f"{usage.completion_tokens:,}",
        "Tokens of the prompt": f"{usage.prompt_tokens:,}{cached}" if usage.prompt_tokens else None,
        "Tokens scored": f"{usage.scored_tokens:,}" if usage.scored_tokens else None,
        "Seconds": f"{usage.seconds:.2f}{scoring}" if usage.seconds else None,
    }
    if isinstance(result, StepResult):
        shown["Rounds"] = result.rounds
        shown["Beams dropped"] = f"{len(result.pruned):,}"
        shown["Repeated steps"] = result.duplicates or None
    if isinstance(result, AdaptiveResult):
        shown["Confidence"] = number(result.confidence)
        shown["Vote"] = "settled before the budget was spent" if result.settled else "not settled early"
    return shown | {"Seed": result.seed} | dict(details)


# --- votes ------------------------------------------------------------------------------------------------------------


def _ballots(result: VoteResult) -> list[str | None]:
    return voters(result.answers, standings(result.candidates))


def _votes(result: VoteResult) -> Html:
    """List the answers, the heaviest first."""
    total = sum(w for w in result.votes.values() if math.isfinite(w)) or 1.0
    columns = [("Answer", ""), ("Candidates", "n"), ("Weight", "n"), ("", "bar"), ("Share", "n"), ("", "")]
    rows = []
    counts = Counter(_ballots(result))
    for answer, weight in result.votes.items():
        chosen = answer == result.answer
        share = bar(weight / total), f"{100 * weight / total:.1f} %"
        cells = one_line(answer, 200), counts[answer], f"{weight:.4g}", *share, "chosen" if chosen else ""
        rows.append(row(columns, cells, class_="best" if chosen else None))
    note = f"{counts[None]} of {len(result.answers)} candidates have no vote: without an answer, or cut."
    return tag(
        "section",
        tag("h3", "Votes"),
        table("Answers with their votes", columns, [tag("tbody", rows)]) if rows else None,
        tag("p", note, class_="note") if counts[None] else None,
    )


def bar(share: float) -> Html:
    """Draw a share between 0 and 1 as a bar. The number stands beside it, so it is hidden from screen readers."""
    wide = f"{100 * min(1.0, max(0.0, share)):.1f}" if math.isfinite(share) else "0"
    back = tag("rect", class_="back", width="100", height="8")
    front = tag("rect", class_="front", width=wide, height="8")
    return tag("svg", back, front, viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true")


# --- steps ------------------------------------------------------------------------------------------------------------


def _steps(i: int, method: str, result: SearchResult) -> Html:
    """Draw the tree, and list what became of beams in each round."""
    adaptive = method == "adaptive"
    says = (
        "Every candidate grew step by step; the number is the reward model's score of the step."
        if adaptive
        else "Steps that beams share stand once. The number is the reward model's score of the step; a dropped beam "
        "shows its aggregate and the lowest one that stayed."
    )
    if method == "dvts":
        trees = [_tree_of(i, n, root, result) for n, root in step_trees(result).items()]
    else:
        trees = _branches(i, step_tree(result), result)
    return tag(
        "section",
        tag("h3", "Tree of steps", id=f"q{i}-tree"),
        tag("p", says, class_="note"),
        tag("div", trees, class_="tree", role="group", aria_labelledby=f"q{i}-tree"),
        _rounds(result.pruned) if result.pruned else None,
    )


def _tree_of(i: int, number_: int, root: StepNode, result: SearchResult) -> Html:
    """Draw one of several trees that grew side by side."""
    said = tag("span", f"Tree {number_ + 1}", class_="said")
    head = tag("summary", said, class_="step head best" if root.best else "step head")
    return tag("details", head, _branches(i, root, result), open=True)


def _branches(i: int, root: StepNode, result: SearchResult) -> list[Html]:
    """Draw what grew from a node: each branch can be closed, and the steps of one that has no fork stand below each
    other."""
    heads = list(root.children)
    for head in heads:  # it grows meanwhile: what a branch forks into comes behind it
        heads += _unforked(head)[-1].children
    steps = {id(head): _unforked(head) for head in heads}
    few = sum(map(len, steps.values())) <= _FEW
    drawn: dict[int, Html] = {}
    ends: dict[int, tuple[int, int]] = {}  # of a branch: candidates, and beams that were lost
    for head in reversed(heads):
        first, *rest = own = steps[id(head)]
        forks = own[-1].children
        found = [*((len(node.candidates), len(node.pruned)) for node in own), *(ends[id(fork)] for fork in forks)]
        ends[id(head)] = kept, lost = sum(n for n, _ in found), sum(n for _, n in found)
        below = kept - len(first.candidates), lost - len(first.pruned)
        drawn[id(head)] = tag(
            "details",
            tag("summary", _step(i, first, result, *below), class_=_look(first)),
            [tag("div", _step(i, node, result), class_=_look(node)) for node in rest],
            [drawn[id(fork)] for fork in forks],
            open=few or head.best,
        )
    return [drawn[id(head)] for head in root.children]


def _unforked(node: StepNode) -> list[StepNode]:
    """Return a node and those behind it, up to where texts part or end."""
    found = [node]
    while len(found[-1].children) == 1:
        found += found[-1].children
    return found


def _look(node: StepNode) -> str:
    lost = node.pruned and not node.candidates and not node.children
    return "step best" if node.best else "step lost" if lost else "step"


def _step(i: int, node: StepNode, result: SearchResult, kept: int = 0, lost: int = 0) -> Html:
    """Show a step, how many candidates end below it and how many beams were lost there, its score, and what became of
    beams at it."""
    below = [f"{kept} candidate{'s' * (kept > 1)}"] if kept else []
    below += [f"{lost} lost"] if lost else []
    fates = []
    for at in node.candidates:
        chosen = at == result.best_index
        answer = result.answers[at] if isinstance(result, VoteResult) else None
        said = f"{'chosen: ' if chosen else ''}candidate {at}, {number(result.scores[at])}, "
        said += _ENDS[result.candidates[at].finish_reason]
        said += "" if answer is None else f", answer {one_line(answer, 40)}"
        fates.append(tag("a", said, href=f"#q{i}-c{at}", class_="fate best" if chosen else "fate"))
    for beam in node.pruned:
        said = f"dropped in round {beam.round}: {number(beam.score)}, lowest that stayed {number(beam.bar)}"
        fates.append(tag("span", said, class_="fate lost"))
    return join(
        tag("span", node.step.rstrip("\n") or "(empty)", class_="said"),
        tag("span", ", ".join(below), class_="inside"),
        tag("span", "" if node.score is None else number(node.score), class_="score"),
        tag("span", fates, class_="fates") if fates else None,
    )


def _rounds(pruned: Sequence[Pruned]) -> Html:
    heads = ("Round", "Beams dropped", "Worst", "Best", "Lowest that stayed", "Tokens of their last steps")
    columns = [(head, "n") for head in heads]
    rows = []
    rounds: dict[int, list[Pruned]] = {}
    for beam in pruned:
        rounds.setdefault(beam.round, []).append(beam)
    for number_, died in sorted(rounds.items()):
        scores = [p.score for p in died]
        figures = [number(figure) for figure in (min(scores), max(scores), min(p.bar for p in died))]
        rows.append(row(columns, (number_, len(died), *figures, f"{sum(p.step_tokens for p in died):,}")))
    return join(
        tag("h4", "Beams dropped in each round"),
        table("Beams dropped in each round", columns, [tag("tbody", rows)], class_="narrow"),
    )


# --- candidates -------------------------------------------------------------------------------------------------------


def _candidates(i: int, result: SearchResult) -> Html:
    """List all of them; of a vote in groups by answer."""
    weight = "Weight" if isinstance(result, VoteResult) else "Score"
    columns = [("#", "n"), (weight, "n"), ("Tokens", "n wide"), ("End", "wide"), ("Text", "t")]
    digits = 0 if all(math.isfinite(s) and s == int(s) for s in result.scores) else 3
    bodies = [
        tag("tbody", head, [_row(i, result, at, digits, columns) for at in numbers])
        for head, numbers in _groups(result)
    ]
    return tag("section", tag("h3", "Candidates"), table("Candidates", columns, bodies, class_="candidates"))


def _groups(result: SearchResult) -> Iterator[tuple[Html | None, list[int]]]:
    """Yield candidates in the order of the page: best first, of a vote answer by answer."""

    def order(at: int) -> tuple[bool, float, int]:
        score = result.scores[at]
        return at != result.best_index, math.inf if math.isnan(score) else -score, at

    everything = sorted(range(len(result.candidates)), key=order)
    if not isinstance(result, VoteResult):
        yield None, everything
        return
    groups: dict[str | None, list[int]] = {answer: [] for answer in (*result.votes, None)}
    for at in everything:
        groups.setdefault(result.answers[at], []).append(at)
    for answer, own in groups.items():
        if own:
            name = "No answer" if answer is None else one_line(answer, 200)
            said = f"{name} · {len(own)} {'candidate' if len(own) == 1 else 'candidates'}"
            yield tag("tr", tag("th", said, colspan=5, scope="rowgroup"), class_="group"), own


def _row(i: int, result: SearchResult, at: int, digits: int, columns: list[tuple[str, str]]) -> Html:
    candidate = result.candidates[at]
    best = at == result.best_index
    end = _ENDS[candidate.finish_reason]
    tokens = f"{len(candidate.token_ids):,}"
    preview = one_line(candidate.text, _PREVIEW) or "(empty)"
    chosen = tag("span", "chosen", class_="tag best") if best else None
    said = tag(
        "details",
        tag("summary", chosen, tag("span", preview, class_="preview")),
        tag("p", f"{tokens} tokens, {end}, seed {candidate.seed}", class_="note"),
        _full(candidate, result, at),
    )
    cells = at, number(result.scores[at], digits), tokens, end, said
    return row(columns, cells, id=f"q{i}-c{at}", class_="best" if best else None)


def _full(candidate: CompletionOutput, result: SearchResult, at: int) -> Html:
    """Show the whole text; where steps were rated, step by step with their scores."""
    path = result.trajectories[at]
    if not path.scores:
        return tag("pre", candidate.text or "(empty)", class_="text", tabindex=0)
    steps = [
        tag("li", tag("span", number(score), class_="score"), tag("pre", step.rstrip("\n"), class_="text"))
        for step, score in zip(path.steps, path.scores, strict=True)
    ]
    return tag("ol", steps, class_="steps")
