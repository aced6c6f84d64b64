"""Generation and searches on a screen: tables of candidates, trees of steps, and what it all cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tilebeam.answers.repetition import repeats_itself
from tilebeam.cli import console
from tilebeam.outputs import Usage
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.contract import SearchResult, VoteResult
from tilebeam.search.tree import StepNode, step_tree

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.outputs import CompletionOutput
    from tilebeam.sampling_params import SamplingParams


def show(result: SearchResult, question: str, *, titled: bool, verbose: bool) -> None:
    """Print the chosen text, under its question if it is titled, and of a vote the answer on stdout; before them on
    stderr who voted for what, and all candidates if it is to be verbose."""
    notes, screen = console.err(), console.out()
    if verbose:
        notes.print(details(result, question))
    if isinstance(result, VoteResult):
        notes.print(Text(votes(result), style="dim"), soft_wrap=True)
    if titled:
        screen.print(Text(one_line(question, 90), style="bold"), soft_wrap=True)
    print(result.best.text, flush=True)
    if isinstance(result, VoteResult):
        screen.print(Text.assemble(("answer: ", "bold"), (result.answer or "none", "bold green")), soft_wrap=True)


def details(result: SearchResult, question: str) -> Tree | Table:
    """Show all candidates: as a tree if their steps were rated, else as a table."""
    title = one_line(question, 90)
    if not any(t.scores for t in result.trajectories):
        return _table(result, title)
    tree = Tree(Text(title, style="bold"), guide_style="dim")
    _plant(tree, step_tree(result), result)
    return tree


def votes(result: VoteResult) -> str:
    """Tell in a line who voted for what, and of an adaptive vote how sure it is."""
    tally = ", ".join(f"{one_line(answer, 20)} x{weight:.4g}" for answer, weight in result.votes.items())
    said = f"votes: {tally or 'none'}"
    if isinstance(result, AdaptiveResult):
        drawn = f"{len(result.candidates)} of {result.budget} candidates"
        said += f"; {'settled after' if result.settled else 'drew'} {drawn}, confidence {result.confidence:.3f}"
    return said


def tell_cut(
    what: str, texts: Sequence[CompletionOutput], params: SamplingParams, lm: LM, max_steps: int | None = None
) -> None:
    """Say on stderr how many texts, which are called `what`, were cut, and which option gives them more room."""
    cut = [len(t.token_ids) for t in texts if t.finish_reason == "length"]
    if not cut or (len(cut) == len(texts) and not lm.chat_template):  # of a base model it is the normal end
        return
    most, at = params.max_tokens or lm.n_ctx, f"at {params.max_tokens or max(cut)} tokens"
    more = [f"-n {2 * most}"] if most < lm.n_ctx else []
    more += [f"-c {2 * lm.n_ctx}"] if 2 * most >= lm.n_ctx else []
    if max_steps is not None and max(cut) < most:
        at, more = f"after {max_steps} steps", [f"--max-steps {2 * max_steps}"]
    said = f"{len(cut)} of {len(texts)} {what} {'was' if len(cut) == 1 else 'were'} cut {at}; {' '.join(more)}"
    console.err().print(f"{said} gives more room", soft_wrap=True)


def tell_loops(results: Sequence[SearchResult]) -> None:
    """Say on stderr which candidates repeat themselves; of several prompts' only how many."""
    found = [str(c.index) for r in results for c in r.candidates if repeats_itself(c.text)]
    if not found:
        return
    which = f"candidate{'s' * (len(found) > 1)} {', '.join(found)}"
    if len(results) > 1:
        which = f"{len(found)} of {sum(len(r.candidates) for r in results)} candidates"
    console.err().print(f"{which} repeat{'s itself' if len(found) == 1 else ' themselves'}", soft_wrap=True)


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


def _table(result: SearchResult, title: str) -> Table:
    answers = result.answers if isinstance(result, VoteResult) else None
    table = Table(title=Text(title), title_justify="left", title_style="bold", expand=True)
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


def _plant(tree: Tree, node: StepNode, result: SearchResult) -> None:
    """Draw all steps behind a node: those of candidates, and those that made room for better ones."""
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
    end = {"stop": "ended", "length": "cut"}[result.candidates[i].finish_reason]
    note = f"{mark}{i}: {result.scores[i]:.3f}, {end}"
    answer = result.answers[i] if isinstance(result, VoteResult) else None
    return note if answer is None else f"{note}, {one_line(answer, 20)}"
