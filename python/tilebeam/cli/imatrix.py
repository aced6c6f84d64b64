"""`tilebeam imatrix`: loads the model, collects, writes the file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.options import Json, Model, Threads
from tilebeam.gguf.whole_file import check_target
from tilebeam.model.load_options import LoadOptions, default_threads
from tilebeam.text_files import read_corpus


def imatrix(
    model: Model,
    file: Annotated[Path, typer.Option("-f", "--file", help="Text file; - reads stdin.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("imatrix.gguf"),
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", min=16, help="Tokens per window.")] = 512,
    chunks: Annotated[int, typer.Option("--chunks", min=-1, help="Windows to read; -1: all.")] = -1,
    process_output: Annotated[
        bool, typer.Option("--process-output", help="Collect for the output matrix, too (tied or not).")
    ] = False,
    threads: Threads = LoadOptions.threads,
    json_: Json = False,
) -> None:
    """Measure how much each input of every weight matrix matters, as llama-imatrix does; runs on the CPU.

    The file is llama.cpp's importance matrix. gguf-repack pack --imatrix uses it to put the error of quantization
    where it matters least, and so does llama-quantize.

    Example: tilebeam imatrix -m model-f16.gguf -f text.txt -o model.imatrix.gguf
    """
    from tilebeam.gguf.imatrix_file import save_imatrix
    from tilebeam.measure.imatrix import collect
    from tilebeam.measure.perplexity import windows_of
    from tilebeam.model.loader import load

    text = read_corpus(file)
    check_target(output)
    threads = threads or default_threads()
    with console.loading(str(model)):
        lm = load(model, device="cpu", n_ctx=256, n_seq_max=1, threads=threads)
    with lm:
        windows = windows_of(lm, text, ctx_size, chunks)
        started = time.monotonic()
        with console.bar("imatrix") as bar:
            task = bar.add_task("imatrix", total=len(windows), note="")
            sums = collect(
                lm,
                windows,
                threads=threads,
                process_output=process_output,
                progress=lambda done: bar.update(task, completed=done),
            )
        seconds = time.monotonic() - started
    save_imatrix(output, sums, datasets=[str(file)], chunks=len(windows), chunk_size=windows.n_ctx)
    about = {
        "output": str(output),
        "tensors": len(sums),
        "chunks": len(windows),
        "chunk_size": windows.n_ctx,
        "seconds": round(seconds, 3),
    }
    if json_:
        print(json.dumps(about, indent=2))
    else:
        console.out().print(
            f"{output}: importance of the inputs of {len(sums)} matrices, from {len(windows)} windows of "
            f"{windows.n_ctx} tokens, {len(windows) * windows.n_ctx / seconds:.0f} tokens/s",
            soft_wrap=True,
        )
