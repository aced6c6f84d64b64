"""Test-time scaling on the tiny world: every method at every budget, and latency.

    python -m bench.tiny_world --into docs/tiny-world.md                      accuracy (minutes)
    python -m bench.tiny_world --into docs/tiny-world.md --latency-items 30   on a quiet machine: latency as well
    python -m bench.tiny_world --into docs/tiny-world.md --thoughts           budgets of thoughts alone (a minute)
    python -m bench.tiny_world --into docs/tiny-world.md --families           hybrid and mixture alone (half a minute)

The three reasoners and the process reward model of bench/tiny/models are evaluated by `tilebeam eval` on expressions
that no model was trained on; the command is printed. What is finished is kept in --out, and a second call goes on from
there: accuracy can be measured on a busy machine, latency later. --fresh begins anew.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilebeam
from tilebeam import SamplingParams, SelfConsistency
from tilebeam.cli import main as cli
from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.estimators import majority_at_k, pass_at_k, wilson
from tilebeam.evaluation.results import PASS

from bench.lib import CACHE, ROOT, report
from bench.lib import plots as pictures
from bench.lib.document import evaluated, plots, put_into
from bench.lib.options import Parser
from bench.tiny import arithmetic, references

SEED = 2026  # of the test expressions
# Seeds and counts of other draws: the reward model was chosen by the first, tests are written around the second.
LOOKED_AT = ((2, 300), (11, 40))
SERIES = {
    GREEDY: "greedy, one answer",
    PASS: "pass@k (bound)",
    "best-of-n[prm]": "best-of-n, reward model",
    "self-consistency": "self-consistency",
    "self-consistency[prm]": "votes weighted by reward model",
    "beam[prm]": "beam search",
    "dvts[prm]": "DVTS",
}


def fresh_expressions(count: int, seed: int = SEED) -> list[str]:
    """Draw test expressions, without those that anybody has looked at before."""
    seen = {p for looked, n in LOOKED_AT for p in arithmetic.draw_many(looked, "test", n)}
    return [p for p in arithmetic.draw_many(seed, "test", count + len(seen)) if p not in seen][:count]


def write_items(path: Path, count: int, seed: int = SEED) -> None:
    """Write the test expressions as items of `tilebeam eval`."""
    problems = fresh_expressions(count, seed)
    lines = [json.dumps({"id": p, "prompt": p + "\n", "answer": str(arithmetic.value(p))}) for p in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(reasoners: Sequence[str], kind: str, items: Path) -> list[str]:
    """Return the command that is run: every method, chosen by the reward model."""
    checker = os.path.relpath(ROOT / "bench" / "tiny" / "arithmetic.py")
    models = [part for n in reasoners for part in ("-m", f"{n}={os.path.relpath(references.file_of(n, kind))}")]
    return [
        *("eval", *models),
        *("--task", f"jsonl:{items}", "--extract", f"{checker}:answer", "--checker", f"{checker}:verdict"),
        *("--method", "greedy,best-of-n,self-consistency,beam,dvts"),
        *("--prm", os.path.relpath(references.file_of(references.PRM, kind)), "--scorer", "prm"),
        *("--reward-kind", "token", "--reward-tag", references.TAG),
        *("--reward-labels", f"{references.GOOD},{references.BAD}"),
        *("--temp", "1.0", "--top-k", "0", "--top-p", "1.0", "-n", "96", "-c", "8192", "--unit-items", "20"),
    ]


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows in the form that all benches share: greedy is the baseline, the range is Wilson's interval."""
    found = json.loads((folder / "report.json").read_text(encoding="utf-8"))["accuracy"]
    figures = {(r["model"], r["series"], r["budget"]): r for r in found}
    most = max(budget for _, _, budget in figures)
    for model in references.REASONERS:
        single = max(1e-9, float(figures[model, GREEDY, 1]["value"]))
        for series, title in SERIES.items():
            if series != GREEDY:
                r = figures[model, series, most]
                ratios = [r[part] / single for part in ("low", "value", "high")]
                percent = [round(100 * v, 2) for v in (single, r["value"])]
                yield report.figures(f"{model}, {title}, {most} candidates", *percent, "% solved", ratios, None)


BUDGETS = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96)  # tokens of thoughts
VOTERS = 8
SHORT = 4  # numbers in a problem that is called short, at most
WAYS = ("one answer", f"vote of {VOTERS}", "one answer, short problems", "one answer, long problems")


def thoughts(count: int, threads: int, budgets: Sequence[int] = BUDGETS, seed: int = SEED) -> list[dict[str, Any]]:
    """Let the thinker solve test expressions with every budget of thoughts.

    Returns:
        of each budget: itself, `tokens` of a sample, and of each of `WAYS` the share that is right, 0 without problems.
        One answer is the mean of the samples that vote.
    """
    problems = arithmetic.draw_many(seed, "test", count, references.THINKERS_TERMS)
    rows = []
    with tilebeam.load(
        references.file_of(references.THINKER, "q8_0"), n_ctx=16384, n_seq_max=64, threads=threads, deterministic=True
    ) as lm:
        talks = [[{"role": "user", "content": problem}] for problem in problems]
        for budget in budgets:
            sampling = SamplingParams(
                temperature=1.0, top_k=0, top_p=1.0, max_tokens=192, seed=seed, thinking_budget=budget
            )
            results = SelfConsistency(arithmetic.answer).run(lm, talks, VOTERS, sampling=sampling)
            single, voted = [], []
            for problem, result in zip(problems, results, strict=True):
                single.append(sum(arithmetic.is_right(problem, c.text) for c in result.candidates) / VOTERS)
                voted.append(arithmetic.is_right(problem, result.best.text))
            short = [len((arithmetic.parts_of(p) or [])[::2]) <= SHORT for p in problems]
            groups = [single, voted]
            groups += [
                [s for s, brief in zip(single, short, strict=True) if brief == wanted] for wanted in (True, False)
            ]
            shares = [sum(group) / max(1, len(group)) for group in groups]
            tokens = sum(len(c.token_ids) for r in results for c in r.candidates) / (VOTERS * count)
            rows.append({"budget": budget, "tokens": tokens, **dict(zip(WAYS, shares, strict=True))})
    return rows


def thoughts_into(rows: Sequence[dict[str, Any]], count: int, document: Path) -> None:
    """Put the table and the picture of `thoughts` into a document."""
    figure, (axes,) = pictures.panels(1, (6.4, 4.2))
    lines = [
        f"{count} test expressions of two to eight numbers, {VOTERS} samples each, temperature 1, seed {SEED}. Right "
        "answers in percent; in parentheses Wilson's 95 % interval over expressions.",
        "",
        "| budget | tokens of a sample | " + " | ".join(WAYS) + " |",
        "| ---: " * (len(WAYS) + 2) + "|",
    ]
    for r in rows:
        low, high = wilson(r[WAYS[1]], count)
        cells = [f"{100 * r[way]:.1f}" for way in WAYS]
        cells[1] += f" ({100 * low:.1f}-{100 * high:.1f})"
        lines.append(f"| {r['budget']} | {r['tokens']:.1f} | " + " | ".join(cells) + " |")
    for way, style in zip(WAYS, ("o-", "s-", "^:", "v:"), strict=True):
        axes.plot([r["budget"] for r in rows], [100 * r[way] for r in rows], style, ms=4, label=way)
    axes.set_xlabel("budget, tokens of thoughts")
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture = document.with_name("tiny-world-thoughts.png")
    pictures.save(figure, "Accuracy over budgets of thoughts", picture)
    put_into(document, "thoughts", "\n".join([*lines, "", f"![Accuracy over budgets of thoughts]({picture.name})"]))


FAMILIES = (references.REASONERS[1], references.HYBRID, references.MIXTURE)
COUNTS = (1, 2, 4, 8, 16)  # samples


def families(count: int, threads: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Let models of several families solve test expressions, each prompt with as many samples as `COUNTS` ends with.

    Returns:
        of each model: `model`, and the shares that are right: `greedy`, and by the number of samples `pass` (any of
        them) and `vote`, means over all draws of so many.
    """
    problems = fresh_expressions(count, seed)
    prompts = [p + "\n" for p in problems]
    rows = []
    for name in FAMILIES:
        with tilebeam.load(references.file_of(name, "q8_0"), n_ctx=8192, n_seq_max=64, threads=threads) as lm:
            free = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=96, seed=seed)
            greedy = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=96))
            outputs = lm.generate(prompts, replace(free, n=COUNTS[-1]))
        right = sum(arithmetic.is_right(p, o.outputs[0].text) for p, o in zip(problems, greedy, strict=True))
        row: dict[str, Any] = {"model": name, "greedy": right / count, "pass": Counter(), "vote": Counter()}
        for problem, output in zip(problems, outputs, strict=True):
            texts = [sample.text for sample in output.outputs]
            correct = [arithmetic.is_right(problem, text) for text in texts]
            answers = [None if (found := arithmetic.answer(text)) is None else int(found) for text in texts]
            for k in COUNTS:
                row["pass"][k] += pass_at_k(len(texts), sum(correct), k) / count
                row["vote"][k] += majority_at_k(answers, correct, k) / count
        rows.append(row)
    return rows


def families_into(rows: Sequence[dict[str, Any]], count: int, document: Path) -> None:
    """Put the table of `families` into a document."""
    lines = [
        f"{count} test expressions, {COUNTS[-1]} samples each, temperature 1, seed {SEED}, Q8_0 files. Right answers "
        "in percent; of one answer Wilson's 95 % interval over expressions.",
        "",
        "| model | method | " + " | ".join(map(str, COUNTS)) + " |",
        "| --- | --- " + "| ---: " * len(COUNTS) + "|",
    ]
    for r in rows:
        low, high = wilson(r["greedy"], count)
        greedy = f"{100 * r['greedy']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
        lines.append(f"| {r['model']} | greedy, one answer | {greedy} |" + "  |" * (len(COUNTS) - 1))
        for what, title in (("pass", "pass@k (bound)"), ("vote", "self-consistency")):
            cells = [f"{100 * r[what][k]:.1f}" for k in COUNTS]
            lines.append(f"| {r['model']} | {title} | " + " | ".join(cells) + " |")
    put_into(document, "families", "\n".join(lines))


def add_solved(rows: report.Rows, name: str, least: float, most: float) -> None:
    """Add a row of two shares of problems that are solved."""
    solved = 100 * least, 100 * most
    rows.add(report.figures(name, *(round(x, 2) for x in solved), "% solved", [solved[1] / max(solved[0], 1e-9)], None))


def main() -> None:
    p = Parser(__doc__, "4 expressions, budgets up to 4")
    p.add_count("--items", usual=200, quick=4, what="test expressions")
    p.add_argument("--seeds", help="every expression runs once with each (default 1,2,3; 1 with --quick)")
    p.add_argument("--kind", default="q8_0", choices=["q8_0", "q4_0"], help="which files")
    p.add_argument("--latency-items", type=int, default=0, help="expressions to time every method on, at least 4")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--out", type=Path, help="log, results, plots (default: in build/bench)")
    p.add_argument("--into", type=Path, help="also put the report into this Markdown file, plots beside it")
    p.add_argument("--thoughts", action="store_true", help="measure budgets of thoughts, and nothing else")
    p.add_argument("--families", action="store_true", help="measure a hybrid and a mixture, and nothing else")
    p.add_argument("--fresh", action="store_true", help="throw away what is in --out")
    options = p.parse()
    rows = report.Rows("tiny_world", options.json)
    if options.thoughts:
        measured = thoughts(options.items, options.threads, (0, 96) if options.quick else BUDGETS)
        for way in WAYS:
            add_solved(rows, f"{way}, {measured[-1]['budget']} tokens of thoughts", measured[0][way], measured[-1][way])
        rows.finish()
        if options.into is not None:
            thoughts_into(measured, options.items, options.into)
        return
    if options.families:
        solved = families(options.items, options.threads)
        for r in solved:
            add_solved(rows, f"{r['model']}, vote of {COUNTS[-1]}", r["greedy"], r["vote"][COUNTS[-1]])
        rows.finish()
        if options.into is not None:
            families_into(solved, options.items, options.into)
        return
    options.seeds = options.seeds or ("1" if options.quick else "1,2,3")
    options.budgets = "1,2,4" if options.quick else "1,2,4,8,16"
    options.out = options.out or CACHE / f"tiny-world{'-quick' * options.quick}"
    if options.fresh:
        shutil.rmtree(options.out, ignore_errors=True)
    items = options.out / "test.jsonl"
    write_items(items, options.items)
    line = command(references.REASONERS, options.kind, items)
    line += ["--budget", options.budgets, "--seeds", options.seeds, "-np", "64", "-t", str(options.threads)]
    line += ["--latency-items", str(options.latency_items), "-o", str(options.out)]
    print("tilebeam", shlex.join(line), file=sys.stderr, flush=True)
    with redirect_stdout(sys.stderr):  # what `tilebeam eval` prints
        cli.app(line, standalone_mode=False)
    for row in rows_of(options.out):
        rows.add(row)
    rows.finish()
    if options.into is not None:
        lines = [*evaluated(options.out, "All methods", SERIES)]
        lines += plots(options.out, "Tiny world", "tiny-world", options.into)
        put_into(options.into, "figures", "\n".join(lines))


if __name__ == "__main__":
    report.start(main)
