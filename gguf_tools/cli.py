"""``gguf-repack``: pack, unpack, verify and inspect GGUF files."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from .byte_bar import byte_bar
from .contents import fidelity
from .errors import GGUFError
from .help_text import App
from .inspection import inspect as inspect_file
from .inspection import table
from .option_groups import grouped
from .policy import GROUPINGS, KEEP, TYPES, Policy, Preset
from .repack import Report
from .repack import pack as pack_file
from .repack import unpack as unpack_file
from .verification import verify as verify_file
from .whole_file import end_output, os_error

MIB = 1 << 20

app = App(help="Rewrite GGUF files into the tile layout of Tilebeam, and back.", no_args_is_help=True)


# Choices are those of the library.
if TYPE_CHECKING:
    Grouping = str
    PackType = str
else:
    Grouping = Literal[GROUPINGS]
    PackType = Literal[(KEEP, *TYPES)]

Source = Annotated[Path, typer.Argument(metavar="IN", help="GGUF file to read.", show_default=False)]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, max=64, help="Worker threads.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")]
Search = Annotated[
    bool, typer.Option("--search", help="Choose every scale for the smallest squared error, not by the largest weight.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The file to write."""

    target: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)]

    def path(self) -> Path:
        """Give its path."""
        if str(self.target) == "-":
            raise typer.BadParameter(
                "cannot write to a pipe: the digests in the header are known only when all tensors are written, and a "
                "partial file must never be taken for a whole one. Name a file"
            )
        return self.target


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options that decide what becomes of each tensor."""

    preset: Annotated[
        Preset | None,
        typer.Option(
            help="lossless: no type changes (the default). paper: Q4_0, the down projections in Q8_0, tile grouping."
        ),
    ] = None
    type: Annotated[PackType | None, typer.Option(help="Quantize weight matrices; keep: leave them.")] = None
    grouping: Annotated[
        Grouping | None,
        typer.Option(
            "--grouping", "--group", help="Elements that share a scale: ggml's 32 of a row (column), or 2 x 16 (tile)."
        ),
    ] = None
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=TYPE[:GROUPING]",
            help="Type of the tensors whose names match, for instance ffn_down=q8_0. May be repeated; the first that "
            "matches counts. Types: keep, q4_0, q8_0, iq4_nl, f16, f32.",
        ),
    ] = None
    output_tensor_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Type of output.weight.")] = None
    token_embedding_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the token embeddings, which are never tiled.")
    ] = None

    def policy(self) -> Policy:
        """Make the policy."""
        given = vars(self) | {"tensor_types": self.tensor_type or ()}
        del given["tensor_type"]
        try:
            return Policy.make(**given)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options of writing a file and of reporting it."""

    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite OUT if it exists.")] = False
    as_json: AsJson = False
    quiet: Quiet = False

    def say(self, report: Report) -> None:
        """Print what became of a file."""
        for note in report.notes:
            typer.echo(f"note: {note}", err=True)
        if self.as_json:
            typer.echo(json.dumps({**asdict(report), "path": str(report.path)}, indent=1))
        elif not self.quiet:
            kind = fidelity(report.lossless, report.same_contents)
            would = "" if report.written else "would be "
            typer.echo(
                f"{report.path}: {would}{report.size / MIB:.1f} MiB, {report.n_tensors} tensors, {report.n_tiled} "
                f"tiled ({report.tiled_bytes / MIB:.1f} MiB), {report.n_requantized} quantized or converted, {kind}",
                err=True,
            )


@app.command()
@grouped
def pack(
    source: Source,
    out: OutputOptions,
    policy: PolicyOptions,
    search: Search = False,
    threads: Threads = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    *,
    result: ResultOptions,
) -> None:
    """Rewrite an ordinary GGUF (of a split model: any part) into the tile layout.

    Without options every Q4_0 to Q8_0, IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q2_K to Q6_K, TQ1_0 and TQ2_0 matrix is packed,
    bit for bit, and `unpack` gives the source back. IQ1_S to IQ3_S, Q1_0 and Q2_0 become tiles when the packed file is
    loaded.

    Example: gguf-repack pack model-f16.gguf model.tb.gguf --type q4_0 --search
    """
    path, chosen = out.path(), policy.policy()
    with byte_bar("pack", result.quiet or dry_run) as progress:
        report = pack_file(
            source,
            path,
            policy=chosen,
            search=search,
            threads=threads,
            progress=progress,
            dry_run=dry_run,
            overwrite=result.force,
        )
    result.say(report)


@app.command()
@grouped
def unpack(source: Source, out: OutputOptions, threads: Threads = None, *, result: ResultOptions) -> None:
    """Rewrite a repacked GGUF into an ordinary one.

    Example: gguf-repack unpack model.tb.gguf model.gguf
    """
    path = out.path()
    with byte_bar("unpack", result.quiet) as progress:
        report = unpack_file(source, path, threads=threads, progress=progress, overwrite=result.force)
    result.say(report)


@app.command()
def verify(
    source: Source,
    against: Annotated[Path | None, typer.Option(metavar="SRC", help="The GGUF it was made from.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check a repacked GGUF: structure, digests, and that it was made of its source.

    Example: gguf-repack verify model.tb.gguf --against model.gguf
    """
    with byte_bar("verify", quiet) as progress:
        found = verify_file(source, against=against, threads=threads, progress=progress)
    if as_json:
        typer.echo(json.dumps({"path": str(source), **asdict(found)}, indent=1))
    elif not quiet:
        how = "unpacks to its source" if found.lossless else "unpacks to its source's contents"
        how = how if found.unpacks else "intact"
        if found.against:
            how = f"made of {against}, {found.exact} tensors hold its very values"
        typer.echo(f"{source}: OK, {found.n_tensors} tensors, {found.n_tiled} tiled, {how}")


@app.command()
def inspect(
    source: Source,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, everything.")] = False,
) -> None:
    """Show what a GGUF holds, ordinary or repacked: every tensor, and the device that would run it.

    Example: gguf-repack inspect model.tb.gguf
    """
    info = inspect_file(source)
    if as_json:
        typer.echo(json.dumps(info, indent=1))
    else:
        # as wide as it needs to be where nobody's terminal limits it
        Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table(info))


def run(call: Callable[[], object], program: str = "gguf-repack") -> int:
    """Exit status of a command; expected failures become one line on stderr."""
    try:
        call()
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is wrong
        sys.stderr.close()
        return 141
    except GGUFError as e:
        typer.echo(f"{program}: {e}", err=True)
    except OSError as e:
        typer.echo(f"{program}: {os_error(e)}".replace("overwrite=True", "--force"), err=True)
        end_output(e)
    except MemoryError:
        typer.echo(f"{program}: out of memory", err=True)
    except KeyboardInterrupt:
        typer.echo(f"{program}: interrupted", err=True)
        return 130
    else:
        return 0
    return 1


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an exception: no partial output stays
    sys.exit(run(app))


if __name__ == "__main__":
    main()
