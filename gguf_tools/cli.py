"""``gguf-repack``: pack, unpack, verify, inspect and convert GGUF files."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from tqdm import tqdm

from .conversion import convert as convert_file
from .errors import GGUFError
from .repack import Report
from .repack import pack as pack_file
from .repack import unpack as unpack_file
from .stream import Progress
from .verification import inspect as inspect_file
from .verification import verify as verify_file

app = typer.Typer(
    help="Rewrite GGUF files into the tile layout of Tilebeam, and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Group(StrEnum):
    """Elements that share a scale."""

    column = "column"
    tile = "tile"


class PackType(StrEnum):
    """What `pack` makes of weight matrices."""

    keep = "keep"
    q4_0 = "q4_0"
    q8_0 = "q8_0"


class ConvertType(StrEnum):
    """What `convert` makes of weight matrices."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


Source = Annotated[Path, typer.Argument(metavar="IN", help="GGUF file to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, max=64, help="Worker threads.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")]

MIB = 1 << 20


@contextlib.contextmanager
def _bar(what: str, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar with rate, on stderr."""
    if quiet:
        yield None
        return
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _say(report: Report, quiet: bool) -> None:
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    if not quiet:
        kind = "lossless" if report.lossless else "not lossless"
        typer.echo(
            f"{report.path}: {report.size / MIB:.1f} MiB, {report.n_tensors} tensors, {report.n_tiled} tiled "
            f"({report.tiled_bytes / MIB:.1f} MiB), {report.n_requantized} quantized or converted, {kind}",
            err=True,
        )


@app.command()
def pack(
    source: Source,
    target: Target,
    group: Annotated[
        Group, typer.Option(help="Elements that share a scale: ggml's (column) or 2 x 16 (tile).")
    ] = Group("column"),
    type: Annotated[PackType, typer.Option(help="Quantize weight matrices first.")] = PackType.keep,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Rewrite an ordinary GGUF into the tile layout."""
    with _bar("pack", quiet) as progress:
        report = pack_file(source, target, group=group.value, type=type.value, threads=threads, progress=progress)
    _say(report, quiet)


@app.command()
def unpack(source: Source, target: Target, threads: Threads = None, quiet: Quiet = False) -> None:
    """Rewrite a repacked GGUF into an ordinary one."""
    with _bar("unpack", quiet) as progress:
        report = unpack_file(source, target, threads=threads, progress=progress)
    _say(report, quiet)


@app.command()
def verify(
    source: Source,
    against: Annotated[Path | None, typer.Option(metavar="SRC", help="The GGUF it was made from.")] = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Check a repacked GGUF: structure, digests, and that it unpacks to (or is made by) its source."""
    with _bar("verify", quiet) as progress:
        found = verify_file(source, against=against, threads=threads, progress=progress)
    if not quiet:
        how = "made again from its source" if found.against else "unpacks to its source" if found.unpacks else "intact"
        typer.echo(f"{source}: OK, {found.n_tensors} tensors, {found.n_tiled} tiled, {how}")


@app.command()
def inspect(
    source: Source,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, everything.")] = False,
) -> None:
    """Show what a GGUF holds, ordinary or repacked."""
    info = inspect_file(source)
    typer.echo(json.dumps(info, indent=1) if as_json else _text(info))


def _text(info: dict[str, Any]) -> str:
    lines = [
        f"{info['path']}: {info['size'] / MIB:.1f} MiB, GGUF version {info['version']}, "
        f"architecture {info['architecture']}, alignment {info['alignment']}"
    ]
    r = info["repacked"]
    if r is None:
        lines.append("ordinary layout")
    else:
        lines.append(
            f"tile layout version {r['layout_version']}, {r['n_tiled']} tiled tensors, "
            f"{'lossless' if r['lossless'] else 'not lossless'}, written by {r['tool_version']}"
        )
        lines.append(f"source sha256 {r['source_sha256']}")
    for kind, n in info["types"].items():
        lines.append(f"  {kind:12} {n['tensors']:5} tensors {n['bytes'] / MIB:10.1f} MiB")
    width = max((len(t["name"]) for t in info["tensors"]), default=0)
    for t in info["tensors"]:
        shape = " x ".join(str(d) for d in t["ne"])
        lines.append(f"{t['name']:{width}}  {t['layout'] or t['type']:12} {shape:>20}  at {t['offset']}")
    return "\n".join(lines)


@app.command()
def convert(
    source: Source,
    target: Target,
    type: Annotated[ConvertType, typer.Option(help="Type of all weight matrices and embeddings.", show_default=False)],
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Write an ordinary GGUF whose weight matrices all have one type."""
    with _bar("convert", quiet) as progress:
        report = convert_file(source, target, type=type.value, threads=threads, progress=progress)
    _say(report, quiet)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that a partial output is removed."""
    raise SystemExit(128 + signal.SIGTERM)


def run(call: Callable[[], object]) -> int:
    """Exit status of a command; expected failures become one line on stderr."""
    try:
        call()
    except GGUFError as e:
        typer.echo(f"gguf-repack: {e}", err=True)
    except OSError as e:
        at = f"{e.filename}: " if e.filename else ""
        typer.echo(f"gguf-repack: {at}{e.strerror or e}", err=True)
    except KeyboardInterrupt:
        typer.echo("gguf-repack: interrupted", err=True)
        return 130
    else:
        return 0
    return 1


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(run(app))


if __name__ == "__main__":
    main()
