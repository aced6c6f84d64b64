"""`tilebeam perplexity`: loads the models, shows progress, prints the figures as llama-perplexity does or as JSON."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilebeam.cli import console
from tilebeam.cli.options import Json, LoraOptions, Model, RunOptions, grouped, option
from tilebeam.errors import TilebeamError
from tilebeam.model.load_options import Device, default_threads
from tilebeam.text_files import read_corpus

if TYPE_CHECKING:
    from rich.console import Console

    from tilebeam.measure.perplexity import Windows
    from tilebeam.measure.perplexity_stats import Estimate, Figures, TokenScores
    from tilebeam.model.lm import LM


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions:
    """What is measured; windows and batches are llama-perplexity's."""

    model: Model
    lora: LoraOptions
    file: Annotated[Path, typer.Option("-f", "--file", help="Text file; - reads stdin.", show_default=False)]
    kl_base: Path | None = option(None, help="What to compare with: a GGUF file of the unquantized model, run beside.")
    base_device: Literal["tilebeam", "cpu", "npu"] | None = option(
        None, "--kl-base-device", help="Where the base runs; default: cpu, unless it is repacked."
    )
    ctx_size: int = option(512, "-c", "--ctx-size", min=4, help="Tokens per window.")
    chunks: int = option(-1, min=-1, help="Windows to measure; -1: all.")
    batch_size: int = option(
        2048, "-b", "--batch-size", min=1, help="Most tokens per llama_decode; several windows if they fit."
    )
    ubatch_size: int = option(512, "-ub", "--ubatch-size", min=1, help="Most tokens per graph.")
    run: RunOptions
    json_: Json = False


@grouped
def perplexity(options: PerplexityOptions) -> None:
    """Measure the perplexity of a model on a text, as llama-perplexity measures it.

    The text is cut into windows of -c tokens; the second half of each is scored. With --kl-base also the KL divergence
    from that model's predictions, and how often both think the same token likeliest.

    Example: tilebeam perplexity -m model-q4_0.gguf -f text.txt --kl-base model-f16.gguf
    """
    from tilebeam.measure.perplexity_stats import figures

    _check(options)
    scores, about = _measured(options)
    found = figures(scores)
    if options.json_:
        print(json.dumps(about | {"figures": found.as_dict()}, indent=2, allow_nan=False))
    else:
        _show_figures(found, about, console.out())


def _check(r: PerplexityOptions) -> None:
    """Refuse options that contradict each other before anything is loaded."""
    if r.chunks == 0:
        raise TilebeamError("--chunks must be positive, or -1 for all windows.")
    if r.kl_base is not None and not r.kl_base.is_file():
        raise TilebeamError(f"{r.kl_base} does not exist or is not a file.")


def _measured(r: PerplexityOptions) -> tuple[TokenScores, dict[str, Any]]:
    """Load the models and score the text; what was measured, and with what."""
    from tilebeam.measure.perplexity import Subject, measure, windows_of

    text = read_corpus(r.file)
    with ExitStack() as stack:
        lm = stack.enter_context(_load(r, r.model, r.run, r.lora))
        windows = windows_of(lm, text, r.ctx_size, r.chunks)
        base = None
        if r.kl_base is not None:
            other = stack.enter_context(_load_base(r, r.kl_base))
            base = Subject("base", other)
        started = time.monotonic()
        with console.bar("") as progress:
            task = progress.add_task("", total=len(windows), note="")

            def show(done: int, scores: dict[str, TokenScores]) -> None:
                progress.update(task, completed=done, note=_note(scores["model"]))

            threads = r.run.threads or default_threads()
            scores = measure([Subject("model", lm)], windows, base, threads=threads, progress=show)["model"]
        return scores, _about(r, lm, windows, time.monotonic() - started)


def _load(r: PerplexityOptions, path: Path, run: RunOptions, lora: LoraOptions) -> LM:
    # llama-perplexity's arrangement: a batch larger than the context takes several windows, which share the cells.
    from tilebeam.model.loader import load

    parallel = max(1, r.batch_size // r.ctx_size)
    arguments = run.arguments()
    with console.loading(str(path)) as show:
        return load(
            path,
            progress=show,
            **arguments,
            n_ctx=parallel * r.ctx_size,
            n_seq_max=parallel,
            n_batch=r.batch_size,
            n_ubatch=min(r.ubatch_size, r.batch_size),
            lora=lora.adapters(),
        )


def _load_base(r: PerplexityOptions, path: Path) -> LM:
    """Load the base, on the CPU unless only the NPU can read it or it was asked for."""
    from tilebeam import gguf as gguf_tools

    device: Device = r.base_device or ("npu" if gguf_tools.is_repacked(path) else "cpu")
    return _load(r, path, r.run.on(device), LoraOptions())


def _note(scores: TokenScores) -> str:
    import numpy as np

    done = scores.nll[np.isfinite(scores.nll)]
    text = f"PPL {np.exp(done.mean()):.4f}"
    if len(scores.kld):
        text += f", KLD {np.nanmean(scores.kld):.5f}"
    return text


def _about(r: PerplexityOptions, lm: LM, windows: Windows, seconds: float) -> dict[str, Any]:
    tokens = len(windows) * windows.n_ctx
    return {
        "model": str(r.model),
        "description": lm.description,
        "device": lm.device,
        "file": str(r.file),
        "base": str(r.kl_base) if r.kl_base is not None else None,
        "n_ctx": windows.n_ctx,
        "n_batch": r.batch_size,
        "n_ubatch": r.ubatch_size,
        "chunks": len(windows),
        "threads": lm.info.threads,
        "cache_type_k": r.run.type_k,
        "cache_type_v": r.run.type_v,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _pm(e: Estimate | None, digits: int, factor: float = 1.0, unit: str = "") -> str:
    return "" if e is None else f"{e.value * factor:.{digits}f} ± {e.error * factor:.{digits}f}{unit}"


def _show_figures(f: Figures, about: dict[str, Any], out: Console) -> None:
    """Print the figures as a table, under llama-perplexity's names."""
    out.print(
        f"{about['chunks']} windows of {about['n_ctx']} tokens, {f.n} scored, {about['seconds']:.1f} s "
        f"({about['tokens_per_second']:.0f} t/s)"
    )
    if f.kld is None or f.kld_percentiles is None:
        out.print(f"Final estimate: PPL = {f.ppl.value:.4f} +/- {f.ppl.error:.5f}")
        return
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("Mean PPL(Q)", _pm(f.ppl, 6))
    table.add_row("Mean PPL(base)", _pm(f.ppl_base, 6))
    table.add_row("Mean ln(PPL(Q)/PPL(base))", _pm(f.log_ratio, 6))
    table.add_row("Mean KLD", _pm(f.kld, 6))
    table.add_row("Maximum KLD", f"{f.kld_max:.6f}")
    for percentile, value in f.kld_percentiles.items():
        table.add_row("Median KLD" if percentile == 50 else f"{percentile:.1f}% KLD", f"{value:.6f}")
    table.add_row("Same top p", _pm(f.same_top, 3, 100, " %"))
    out.print(table)
