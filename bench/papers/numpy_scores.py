"""What other numerics cost a model: the last tokens of windows, scored by the numpy model and by itself in float32."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilebeam
from tilebeam.cli import console
from tilebeam.measure.perplexity import LogitScorer, windows_of
from tilebeam.measure.perplexity_stats import TokenScores, figures

from bench.lib import gemma, models, report
from bench.lib.options import Parser
from bench.papers.numpy_model import F32, Activations, Model, Numerics


@dataclass(frozen=True)
class Way:
    """A row: how a pass computes.

    Attributes:
        watch: sees what enters the products of window 0, which is not scored, before anything is.
    """

    name: str
    how: Numerics
    watch: Activations | None = None


def add_options(p: Parser) -> None:
    p.add_model("GGUF of the architecture qwen2")
    p.add_argument("-f", "--file", type=Path, help="the text (default: Python's language reference)")
    p.add_argument("-c", "--ctx-size", type=int, default=512, help="tokens of a window (default: 512)")
    p.add_argument("--scored", type=int, help="of these at its end (default: half, 256 at most)")
    p.add_count("--windows", usual=4, quick=1, what="windows that are scored")
    p.add_argument("--only", default="", metavar="TEXT", help="ways whose name contains this")


def compare(args: argparse.Namespace, ways: Callable[[Model, int], Sequence[Way]]) -> list[dict[str, Any]]:
    """Make a row for each way, float32's own first.

    Args:
        args: those of `add_options`.
        ways: of a model and the tokens of a window that come before what is scored.
    """
    last = args.scored or min(256, args.ctx_size // 2)
    if not 1 < last < args.ctx_size:
        raise ValueError(f"--scored {last}: a window has {args.ctx_size} tokens")
    text = args.file.read_text("utf-8", "replace") if args.file else gemma.text()
    path = args.model or models.synthetic("small", "f16")
    with tilebeam.load(path, device="cpu", n_ctx=256, n_seq_max=1) as lm:
        cut = windows_of(lm, text, args.ctx_size, args.windows + 1)
    model = Model(path)
    wanted = [way for way in ways(model, args.ctx_size - last) if args.only in way.name]
    todo = [Way("float32", Numerics()), *wanted]
    for way in todo:
        if way.watch:
            model.logits(cut.inputs(0), last, Numerics(way.watch))
    parts: dict[str, list[TokenScores]] = {way.name: [] for way in todo}
    seconds = dict.fromkeys(parts, 0.0)
    read: dict[str, float] = {}
    with console.bar("windows") as progress, LogitScorer(model.n_vocab, 1) as scorer:
        task = progress.add_task("", total=args.windows * len(todo), note="")
        for window in range(1, len(cut)):
            base: F32 | None = None
            targets = cut.tokens[window, args.ctx_size - last + 1 :]
            for way in todo:
                started = time.perf_counter()
                found = model.logits(cut.inputs(window), last, way.how)
                seconds[way.name] += time.perf_counter() - started
                values = found.values[:-1]
                base = values if base is None else base
                parts[way.name].append(scores := TokenScores.empty(len(targets), True))
                scorer.score(values, targets, scorer.logits(base), scores, 0)
                read[way.name] = found.read
                progress.update(task, advance=1, description=way.name)
    times = {name: value / seconds["float32"] for name, value in seconds.items()}
    return [_row(name, TokenScores.joined(part), read[name], times[name]) for name, part in parts.items()]


def note(row: dict[str, Any]) -> str:
    kld, ratio = row["kld"], row["log_ratio"]
    return (
        f"KLD {1e3 * kld['value']:.2f} +- {1e3 * kld['stderr']:.2f} e-3, same top {row['same_top']['value']:.1%}, "
        f"ln(PPL ratio) {ratio['value']:+.4f} +- {ratio['stderr']:.4f}, {row['tokens_read']:.0%} of the tokens read, "
        f"{row['time_of_float32']:.2f} of the time"
    )


def _row(name: str, scores: TokenScores, read: float, time_of_float32: float) -> dict[str, Any]:
    f = figures(scores)
    assert f.ppl_base is not None
    assert f.log_ratio is not None
    assert f.kld is not None
    assert f.same_top is not None
    more = {
        "ppl_stderr": round(f.ppl.error, 4),
        "log_ratio": f.log_ratio.as_dict(),
        "kld": f.kld.as_dict(),
        "same_top": f.same_top.as_dict(),
        "tokens_read": round(read, 4),
        "time_of_float32": round(time_of_float32, 3),
    }
    ratios = [f.ppl_base.value / f.ppl.value]
    return report.figures(name, round(f.ppl_base.value, 4), round(f.ppl.value, 4), "PPL", ratios, None, **more)
