"""Accuracy of the tile layouts, the numerics and the KV cache types on a real model: perplexity and KL divergence.

One command makes every table of docs/accuracy.md. From one source (by default gemma-3-270m as its package has it,
Q4_K_M, dequantized) it packs all variants, runs them window by window beside their base, and keeps what it measured per
token under --out: a run that is killed loses one block of windows, and the next goes on from there. Windows are taken
spread over the text, so that a run cut short is a sample of all of it. The text is Python's own language reference as
the standard library carries it (pydoc_data.topics).

    python -m bench.accuracy [--out DIR] [--as-is] [--quick] [--json]

Differences between variants are paired by token, which makes their standard errors much smaller than those of the
perplexities themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tilebeam
from tilebeam.cli import console
from tilebeam.gguf.whole_file import whole_file
from tilebeam.model.lm import LM

from bench.lib import CACHE, gemma
from bench.lib.accuracy_variants import (
    AS_IS,
    BATCH,
    LAYOUTS,
    Comparison,
    Group,
    Variant,
    model_file,
)
from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.lib.perplexity import Estimate, Subject, TokenScores, Windows, log_ratio, mean, measure, windows_of
from bench.lib.perplexity import figures as figures_of
from bench.lib.report import Rows, figures, start

BLOCK = 2  # windows between two saves


# --- measuring --------------------------------------------------------------------------------------------------------


def setting_of(source: Path, text: str, windows: Windows) -> dict[str, Any]:
    """Return what must be the same for kept results to be used again."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    read = {"text_sha256": hashlib.sha256(text.encode()).hexdigest(), "n_ctx": windows.n_ctx, "windows": len(windows)}
    return {"source_sha256": digest} | read


Kept = dict[str, tuple[TokenScores, float]]  # by variant: its scores, and the seconds that decoding took


class Store:
    """Scores of each variant of each group, kept as files: arrays [windows, scored], NaN where nothing was measured."""

    def __init__(self, folder: Path, wanted: dict[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "setting.json"
        if note.exists() and json.loads(note.read_text()) != wanted:
            raise ValueError(f"{folder} holds results of another model, text or context: choose another --out")
        note.write_text(json.dumps(wanted, indent=1))

    def _path(self, group: Group, variant: Variant) -> Path:
        return self._folder / f"{group.base.label}--{variant.label}.npz"

    def load(self, group: Group, variant: Variant, windows: Windows) -> tuple[TokenScores, float]:
        """Return what is kept (NaN elsewhere), and the seconds that decoding it took."""
        path = self._path(group, variant)
        if not path.exists():
            return TokenScores.empty(len(windows) * windows.scored), 0.0
        with np.load(path) as kept:
            return TokenScores(**{name: kept[name] for name in kept if name != "seconds"}), float(kept["seconds"])

    def save(self, group: Group, variant: Variant, scores: TokenScores, seconds: float) -> None:
        path = self._path(group, variant)
        with whole_file(path) as partial, partial.open("wb") as file:
            np.savez(file, seconds=np.asarray(seconds), **vars(scores))


def spread(n: int) -> list[int]:
    """0 .. n - 1 in an order whose every beginning is spread over all of it (steps of the golden ratio)."""
    golden = (5**0.5 - 1) / 2
    return sorted(range(n), key=lambda i: i * golden % 1.0)


class Models:
    """Loaded models by file, device and cache type; variants that differ in arithmetic only share one."""

    def __init__(self, folder: Path, source: Path, n_ctx: int, threads: int, stack: ExitStack) -> None:
        self._folder, self._source, self._n_ctx, self._threads, self._stack = folder, source, n_ctx, threads, stack
        self._loaded: dict[tuple[Any, ...], LM] = {}

    def subject(self, variant: Variant) -> Subject:
        key = (variant.file, variant.device, variant.kv, variant.n_ubatch)
        if key not in self._loaded:
            path = model_file(variant.file, self._folder, self._source)
            self._loaded[key] = self._stack.enter_context(
                tilebeam.load(
                    path,
                    device=variant.device,
                    n_ctx=self._n_ctx,
                    n_seq_max=1,
                    n_batch=BATCH,
                    n_ubatch=min(variant.n_ubatch, BATCH),
                    threads=self._threads,
                    type_k=variant.kv,
                    type_v=variant.kv,
                )
            )
        if variant.device == "cpu":
            return Subject(variant.name, self._loaded[key])
        from tilebeam.native.control import control

        npu = control()
        return Subject(
            variant.name,
            self._loaded[key],
            lambda: npu.configure(numerics=variant.numerics, softmax=variant.softmax),
        )


def run_block(group: Group, windows: Windows, block: list[int], kept: Kept, models: Models, threads: int) -> set[str]:
    """Measure what is not kept yet of these windows, into `kept`; the names of the variants that were measured."""
    wanted = tuple(v for v in group.variants if any(is_missing(kept[v.name][0], windows, w) for w in block))
    seconds: dict[str, float] = {}
    part = Windows(windows.tokens[block], windows.bos)
    base = models.subject(group.base)
    found = measure([models.subject(v) for v in wanted], part, base, threads=threads, seconds=seconds)
    for variant in wanted:
        scores, spent = kept[variant.name]
        for i, window in enumerate(block):
            for name, array in vars(scores).items():
                at, there = window * windows.scored, i * windows.scored
                array[at : at + windows.scored] = getattr(found[variant.name], name)[there : there + windows.scored]
        kept[variant.name] = scores, spent + seconds[variant.name]
    return {v.name for v in wanted}


def is_missing(scores: TokenScores, windows: Windows, window: int) -> bool:
    return bool(np.isnan(scores.nll[window * windows.scored]))


def run_group(group: Group, windows: Windows, chunks: int, store: Store, models: Models, threads: int) -> None:
    """Measure what is not kept yet of the first `chunks` windows, and keep it block by block."""
    order = spread(len(windows))[: min(group.most or chunks, chunks)]
    kept = {v.name: store.load(group, v, windows) for v in group.variants}
    todo = [w for w in order if any(is_missing(scores, windows, w) for scores, _ in kept.values())]
    with console.bar("windows") as bar:
        task = bar.add_task(group.title, total=len(todo), note="")
        for first in range(0, len(todo), BLOCK):
            block = todo[first : first + BLOCK]
            measured = run_block(group, windows, block, kept, models, threads)
            for variant in (v for v in group.variants if v.name in measured):
                store.save(group, variant, *kept[variant.name])
            bar.update(task, advance=len(block))


# --- reporting --------------------------------------------------------------------------------------------------------


def done(scores: TokenScores) -> int:
    return int(np.isfinite(scores.nll).sum())


def pm(e: Estimate, digits: int, factor: float = 1.0) -> str:
    return f"{e.value * factor:.{digits}f} ± {e.error * factor:.{digits}f}"


def group_rows(group: Group, store: Store, windows: Windows) -> list[dict[str, Any]]:
    """Figures of a group's variants over the tokens that all of them have; what was not begun is left out."""
    kept = [(variant, *store.load(group, variant, windows)) for variant in group.variants]
    kept = [(variant, scores, seconds) for variant, scores, seconds in kept if done(scores) > 1]
    common = np.logical_and.reduce([np.isfinite(scores.nll) for _, scores, _ in kept]) if kept else np.zeros(0, bool)
    rows = []
    for variant, scores, seconds in kept:
        speed = done(scores) / windows.scored * windows.n_ctx / seconds if seconds else None
        scores.nll[~common] = np.nan
        if done(scores) > 1:
            rows.append({"variant": variant.name, "tokens_per_second": speed, "figures": figures_of(scores)})
    return rows


def group_table(group: Group, rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]["figures"]
    lines = [
        f"### {group.title}",
        "",
        f"Base: {group.base.name}, PPL {pm(first.ppl_base, 4)}; {first.n} tokens scored.",
        "",
        "| variant | PPL | PPL against base, % | mean KLD, 1e-3 | median | 99 % | max | same top, % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        f = row["figures"]
        tail = [f.kld_percentiles[50.0], f.kld_percentiles[99.0], f.kld_max]
        lines.append(
            f"| {row['variant']} | {pm(f.ppl, 4)} | {f.log_ratio.value * 100:+.3f} ± {f.log_ratio.error * 100:.3f} | "
            f"{pm(f.kld, 4, 1e3)} | {tail[0] * 1e3:.4f} | {tail[1] * 1e3:.3f} | {tail[2] * 1e3:.2f} | "
            f"{pm(f.same_top, 2, 100)} |"
        )
    return "\n".join(lines)


def pair_rows(comparison: Comparison, store: Store, windows: Windows) -> list[dict[str, Any]]:
    """Return the paired comparisons, over the tokens that both sides have."""
    group = comparison.groups[-1]  # results are kept by base and variant: this finds those of all groups with its base
    rows = []
    for pair in comparison.pairs:
        one, _ = store.load(group, pair.one, windows)
        other, _ = store.load(group, pair.other, windows)
        both = np.isfinite(one.nll) & np.isfinite(other.nll)
        if both.sum() < 2:
            continue
        rows.append(
            {
                "question": pair.question,
                "one": pair.one.name,
                "other": pair.other.name,
                "tokens": int(both.sum()),
                "log_ratio": log_ratio(one.nll[both], other.nll[both]),
                "kld": mean(one.kld[both] - other.kld[both]),
            }
        )
    return rows


def pair_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "### Paired by token",
        "",
        "| | | against | PPL, % | KLD to the source, 1e-3 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        r, k = row["log_ratio"], row["kld"]
        lines.append(
            f"| {row['question']} | {row['one']} | {row['other']} | {r.value * 100:+.3f} ± {r.error * 100:.3f} | "
            f"{k.value * 1e3:+.4f} ± {k.error * 1e3:.4f} |"
        )
    return "\n".join(lines)


def tables(comparison: Comparison, store: Store, windows: Windows, about: dict[str, Any]) -> str:
    head = (
        f"Source: {about['source']} ({about['description']}), {comparison.about}. Text: {about['text']}, "
        f"{about['tokens']} tokens in {about['windows']} windows of {about['n_ctx']}; the second half of each is "
        "scored. ± is one standard error."
    )
    parts = [textwrap.fill(head, 120, break_on_hyphens=False)]
    for group in comparison.groups:
        if rows := group_rows(group, store, windows):
            parts.append(group_table(group, rows))
    if pairs := pair_rows(comparison, store, windows):
        parts.append(pair_table(pairs))
    return "\n\n".join(parts) + "\n"


def shared_row(group: Group, row: dict[str, Any]) -> dict[str, Any]:
    """Make a variant's row in the form that all benches share; the range of the ratio is two standard errors."""
    f = row["figures"]
    low, value, high = (math.exp(-f.log_ratio.value + s * f.log_ratio.error) for s in (-2, 0, 2))
    return figures(
        f"{row['variant']}, against {group.base.name}",
        round(f.ppl_base.value, 4),
        round(f.ppl.value, 4),
        "perplexity",
        [low, value, high],
        None,
        kld=round(f.kld.value, 6),
        tokens=f.n,
    )


def main() -> None:
    """Measure what is missing, write tables, print rows."""
    p = Parser((__doc__ or "").split("\n\n")[0], "2 windows of 256 tokens of each group")
    p.add_argument("--out", type=Path, help="folder for models, results and tables (default: in build/bench)")
    p.add_argument("--fresh", action="store_true", help="measure again what --out has")
    p.add_model("source GGUF", "gemma-3-270m")
    p.add_argument("-f", "--file", type=Path, help="text (default: Python's language reference)")
    p.add_count("-c", "--ctx-size", usual=512, quick=256, what="tokens per window")
    p.add_argument("--chunks", type=int, help="windows at most")
    p.add_threads()
    p.add_argument("--report", action="store_true", help="measure nothing, only make the tables anew")
    p.add_argument(
        "--as-is", action="store_true", help="the file in its own types on both devices, instead of types made of it"
    )
    p.add_argument("--into", type=Path, help="also put the tables into this Markdown file, between its marks")
    p.add_argument("--mark", default="tables", help="name of these marks (default: tables)")
    args = p.parse()
    source = args.model or gemma.model()
    text = args.file.read_text("utf-8", "replace") if args.file else gemma.text()
    comparison = AS_IS if args.as_is else LAYOUTS
    args.out = args.out or CACHE / f"accuracy{'-as-is' * args.as_is}{'-quick' * args.quick}"
    if args.fresh:
        shutil.rmtree(args.out / "scores", ignore_errors=True)
    folder = args.out / "models"
    folder.mkdir(parents=True, exist_ok=True)
    with tilebeam.load(source, device="cpu", n_ctx=256, n_seq_max=1) as lm:
        windows = windows_of(lm, text, args.ctx_size)
        description = lm.description
    store = Store(args.out / "scores", setting_of(source, text, windows))
    chunks = args.chunks or (2 if args.quick else len(windows))
    for group in () if args.report else reversed(comparison.groups):  # the one with the most to say first
        with ExitStack() as stack:
            models = Models(folder, source, args.ctx_size, args.threads, stack)
            run_group(group, windows, chunks, store, models, args.threads)
    about = {
        "source": source.name,
        "description": description,
        "text": args.file.name if args.file else f"pydoc_data.topics of Python {sys.version.split()[0]}",
        "tokens": int(windows.tokens.size),
        "windows": len(windows),
        "n_ctx": windows.n_ctx,
    }
    text = tables(comparison, store, windows, about)
    (args.out / "accuracy.md").write_text(text)
    if args.into:
        put_into(args.into, args.mark, text)
    if not args.json:
        print(text)
        return
    # Of two with the same base and variant the later one has more windows.
    shared = [shared_row(group, row) for group in comparison.groups for row in group_rows(group, store, windows)]
    out = Rows("accuracy", True)
    for row in {row["name"]: row for row in shared}.values():
        out.add(row)
    out.finish()


if __name__ == "__main__":
    start(main)
