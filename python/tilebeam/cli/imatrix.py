"""`tilebeam imatrix`: loads the model, collects, writes the file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tilebeam.cli import console
from tilebeam.gguf.imatrix import save_imatrix
from tilebeam.gguf.whole_file import check_target
from tilebeam.measure.imatrix import collect
from tilebeam.measure.perplexity import windows_of
from tilebeam.model.loader import load
from tilebeam.text_files import read_corpus


@dataclass(frozen=True)
class Request:
    """What the command was asked for; names as its options."""

    model: Path
    file: Path
    output: Path
    ctx_size: int
    chunks: int
    threads: int | None
    process_output: bool
    json: bool


def run(r: Request) -> None:
    """Collect and write."""
    text = read_corpus(r.file)
    check_target(r.output)
    threads = r.threads or len(os.sched_getaffinity(0))
    with console.loading(str(r.model)):
        lm = load(r.model, device="cpu", n_ctx=256, n_seq_max=1, threads=threads)
    with lm:
        windows = windows_of(lm, text, r.ctx_size, r.chunks)
        started = time.monotonic()
        with console.bar("imatrix") as bar:
            task = bar.add_task("imatrix", total=len(windows), note="")
            sums = collect(
                lm,
                windows,
                threads=threads,
                process_output=r.process_output,
                progress=lambda done: bar.update(task, completed=done),
            )
        seconds = time.monotonic() - started
    save_imatrix(r.output, sums, datasets=[str(r.file)], chunks=len(windows), chunk_size=windows.n_ctx)
    about = {
        "output": str(r.output),
        "tensors": len(sums),
        "chunks": len(windows),
        "chunk_size": windows.n_ctx,
        "seconds": round(seconds, 3),
    }
    if r.json:
        print(json.dumps(about, indent=2))
    else:
        console.out().print(
            f"{r.output}: importance of the inputs of {len(sums)} matrices, from {len(windows)} windows of "
            f"{windows.n_ctx} tokens, {len(windows) * windows.n_ctx / seconds:.0f} tokens/s",
            soft_wrap=True,
        )
