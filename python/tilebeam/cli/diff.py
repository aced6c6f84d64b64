"""`tilebeam diff`: runs a model on two devices and shows where their tensors begin to differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.options import ExecutorOption, Json, Model, Threads
from tilebeam.errors import TilebeamError
from tilebeam.model.load_options import Backend, LoadOptions, backends, default_threads
from tilebeam.text_files import read_corpus

if TYPE_CHECKING:
    from tilebeam.measure.deviation import Deviation, Recorder

# Numbers, names and words of several languages: tokens that lie far apart.
_TEXT = (
    "In 1969 Neil Armstrong walked on the Moon, 384400 km away; 12 + 30 = 42. Wer rastet, der rostet. "
    "def area(r): return 3.14159 * r ** 2  # square metres\n"
)


def diff(
    model: Model,
    device: Annotated[str, typer.Option("--device", help="Two devices; the first is the reference.")] = "cpu,tilebeam",
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Text to read; default: one that is built in.")
    ] = None,
    tokens: Annotated[int, typer.Option("-c", "--ctx-size", min=1, help="Tokens of the text, read as one batch.")] = 64,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="All tensors, in the order of the graph; every op then runs alone.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="With all tensors: of this layer only. Implies --tensors.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Relative error from which a tensor deviates.")
    ] = 0.1,
    threads: Threads = LoadOptions.threads,
    executor: ExecutorOption = LoadOptions.executor,
    json_: Json = False,
) -> None:
    """Compare a model's tensors on two devices, and name the first one that deviates. For people who port a device.

    Without --tensors these are the outputs of layers, and what lies between runs as it does in use; --layer shows all
    of a layer that deviates. Errors are root mean squares of the difference, relative to the reference's; 8-bit
    activations alone make some percent.

    Exit status: 0 if no tensor deviates, 1 if one does, 2 for errors.

    Example: tilebeam diff -m model.gguf --device cpu,tilebeam
    """
    from tilebeam.measure.deviation import Recorder, deviations, first_beyond

    reference, other = _devices(device)
    text = _TEXT * 8 if file is None else read_corpus(file)
    sides = Recorder(tensors, layer), Recorder(tensors, layer)
    for name, recorder in zip((reference, other), sides, strict=True):
        _record(recorder, model, name, text, tokens, threads or default_threads(), executor)
    found = deviations(*sides)
    if not found:
        raise TilebeamError("The two devices have no tensor in common: their graphs differ.")
    first = first_beyond(found, tolerance)
    if json_:
        print(json.dumps(_plain(found, first, reference, other, tolerance), indent=2))
    else:
        _show(found, first, reference, other, tolerance)
    if first is not None:
        raise typer.Exit(1)


def _devices(text: str) -> tuple[Backend, Backend]:
    found = backends(text)
    if len(found) != 2:
        raise TilebeamError(f"--device {text}: give two, such as cpu,tilebeam.")
    return found[0], found[1]


def _record(
    recorder: Recorder, model: Path, device: Backend, text: str, tokens: int, threads: int, executor: Any
) -> None:
    """Keep what a model computes on a device."""
    from tilebeam.measure.deviation import record
    from tilebeam.model.loader import load

    own = {"executor": executor} if device == "npu" else {}
    with console.loading(f"{model} on {device}"):
        lm = load(model, device=device, n_ctx=max(tokens, 64), n_seq_max=1, threads=threads, lookup=False, **own)
    with lm:
        record(lm, lm.tokenize(text)[:tokens], recorder, threads)


def _plain(
    found: list[Deviation], first: Deviation | None, reference: str, other: str, tolerance: float
) -> dict[str, Any]:
    """For JSON, which has no infinity: null."""

    def row(d: Deviation) -> dict[str, Any]:
        return {k: None if v == float("inf") else v for k, v in asdict(d).items()}

    return {
        "reference": reference,
        "device": other,
        "tolerance": tolerance,
        "first": None if first is None else first.name,
        "tensors": [row(d) for d in found],
    }


def _show(found: list[Deviation], first: Deviation | None, reference: str, other: str, tolerance: float) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, right in (("tensor", False), ("op", False), ("shape", True), ("error", True), ("worst", True)):
        table.add_column(name, justify="right" if right else "left")
    for d in found:
        shape = " x ".join(map(str, d.shape))
        style = "bold red" if d is first else "red" if d.error > tolerance else ""
        table.add_row(d.name, d.op, shape, f"{d.error:.2e}", f"{d.worst:.2e}", style=style)
    out = console.out()
    out.print(table)
    if first is None:
        out.print(f"{len(found)} tensors: {other} is within {tolerance:g} of {reference}.", highlight=False)
    else:
        out.print(f"First beyond {tolerance:g}: {first.name} ({first.op}), {first.error:.2e}.", highlight=False)
