"""Generation and searches on a screen: tables of candidates, trees of steps, and what it all cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tilebeam.cli import console
from tilebeam.outputs import Usage
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.contract import SearchResult, VoteResult
from tilebeam.search.tree import StepNode, step_tree

if TYPE_CHECKING:
    from tilebeam.outputs import CompletionOutput


def print_json(results: Sequence[SearchResult], **facts: Any) -> None:
    """One object for one prompt, a line of JSON each for several."""
    for result in results:
        print(json.dumps(result.as_dict() | facts, indent=2 if len(results) == 1 else None))


def show(screen: Console, result: SearchResult) -> None:
    """Candidates as a tree if their steps were rated, else as a table; of a vote, the answers and their tally."""
    if any(t.scores for t in result.trajectories):
        screen.print(_tree(result))
    else:
        screen.print(_table(result))
    if isinstance(result, VoteResult):
        tally = ", ".join(f"{one_line(answer, 20)} x{votes:.4g}" for answer, votes in result.votes.items())
        said = Text.assemble(
            ("answer: ", "bold"), (one_line(result.answer or "none", 60), "bold green"), f"  ({tally})"
        )
        if isinstance(result, AdaptiveResult):
            drawn = f"{len(result.candidates)} of {result.budget} candidates"
            said.append(
                f"; {'settled after' if result.settled else 'drew'} {drawn}, confidence {result.confidence:.3f}"
            )
        screen.print(said)


def account(results: Sequence[Usage], seed: int | None) -> None:
    """Print to stderr what it cost."""
    usage = sum(results, Usage())
    tokens = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} sampled"
    if usage.scored_tokens:
        tokens += f" + {usage.scored_tokens} scored"
    if usage.drafted_tokens:
        tokens += f" ({usage.accepted_tokens} of {usage.drafted_tokens} guesses right)"
    seconds = usage.decode_seconds + usage.drafting_seconds
    speed = f", {usage.completion_tokens / seconds:.1f} t/s decode" if seconds > 0 else ""
    scoring = f", {usage.scoring_seconds:.2f} s of it scoring" if usage.scoring_seconds >= 0.005 else ""
    line = f"{tokens} tokens in {usage.seconds:.2f} s{scoring}{speed}, seed {seed}"
    console.err().print(line, style="dim", soft_wrap=True)


def one_line(text: str, limit: int) -> str:
    """Cut a text in the middle: the end matters in a prompt, and the start in a sample."""
    flat = " ".join(text.split())
    if len(flat) <= limit:
        return flat
    half = (limit - 3) // 2
    return f"{flat[:half]} … {flat[-half:]}"


def _table(result: SearchResult) -> Table:
    answers = result.answers if isinstance(result, VoteResult) else None
    table = Table(title=Text(one_line(result.prompt, 90)), title_justify="left", title_style="bold", expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    if answers is not None:
        table.add_column("answer", justify="right", no_wrap=True)
    weighted = answers is None or len(set(result.scores)) > 1
    if weighted:
        table.add_column("score" if answers is None else "weight", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    table.add_column("text", ratio=1, overflow="fold")
    for i, candidate in enumerate(result.candidates):
        best = i == result.best_index
        cells = [f"{'>' if best else ' '}{i}"]
        if answers is not None:
            cells.append(one_line(answers[i] or "-", 20))
        if weighted:
            cells.append(f"{result.scores[i]:.3f}")
        cells += [str(len(candidate.token_ids)), candidate.finish_reason, one_line(candidate.text, 400)]
        table.add_row(*map(Text, cells), style="bold green" if best else None)
    return table


def _tree(result: SearchResult) -> Tree:
    """All steps that were drawn: those of candidates, and those that made room for better ones."""
    tree = Tree(Text(one_line(result.prompt, 90), style="bold"), guide_style="dim")
    _plant(tree, step_tree(result), result)
    return tree


def _plant(tree: Tree, node: StepNode, result: SearchResult) -> None:
    for child in node.children:
        score = "" if child.score is None else f"{child.score:.3f} "
        label = Text.assemble((score, "cyan"), one_line(child.step, 300) or "(empty)")
        for note in [*(_note(result, i) for i in child.candidates), *("pruned" for _ in child.pruned)]:
            label.append(f"  [{note}]", style="dim")
        if child.best:
            label.stylize("bold green")
        _plant(tree.add(label), child, result)


def _note(result: SearchResult, i: int) -> str:
    """Describe a candidate's end."""
    mark = "> " if i == result.best_index else ""
    note = f"{mark}{i}: {result.scores[i]:.3f}, {_end(result.candidates[i])}"
    answer = result.answers[i] if isinstance(result, VoteResult) else None
    return note if answer is None else f"{note}, {one_line(answer, 20)}"


def _end(candidate: CompletionOutput) -> str:
    return {"stop": "ended", "length": "cut", "aborted": "given up"}[candidate.finish_reason]
