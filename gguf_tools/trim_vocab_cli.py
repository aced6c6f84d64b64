"""``gguf-trim-vocab``: cut a model's vocabulary down to what a corpus needs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from .byte_bar import byte_bars
from .cli import MIB, run
from .help_text import App
from .trim_vocab import TrimReport, as_json, trim_vocab

app = App()


@app.command()
def trim(
    source: Annotated[Path, typer.Argument(metavar="IN", help="GGUF model, not repacked.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="GGUF file to write.", show_default=False)],
    corpus: Annotated[list[Path], typer.Option(metavar="FILE", help="Text in UTF-8; its tokens are kept. Repeatable.")],
    min_count: Annotated[
        int, typer.Option(min=1, metavar="N", help="Drop tokens that the corpus has less than N times.")
    ] = 1,
    keep_tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Further tokens to keep, one a line, as in text.")
    ] = None,
    drop_unused: Annotated[
        bool, typer.Option("--drop-unused", help='Also drop control tokens named "unused".')
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite OUT if it exists.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report in JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:
    """Write IN to OUT with only the tokens that special texts, bytes and a corpus need.

    Embedding and output matrices lose the rows of all other tokens, so the file is smaller and decoding faster. Text
    whose tokens are all kept is cut into the same tokens as before, with the same logits; any other text is cut into
    smaller pieces, down to bytes. Before OUT appears, llama.cpp cuts the corpus with it and must get its text back.

    Example: gguf-trim-vocab model.gguf small.gguf --corpus text.txt

    Tile the result afterwards: gguf-repack pack OUT OUT.tb.gguf
    """
    with byte_bars(quiet) as progress:
        report = trim_vocab(
            source,
            target,
            corpus=corpus,
            min_count=min_count,
            keep_tokens=keep_tokens,
            drop_unused=drop_unused,
            dry_run=dry_run,
            overwrite=force,
            progress=progress,
        )
    if json_:
        typer.echo(json.dumps(as_json(report), indent=1))
    elif not quiet:
        _say(report)


def _say(r: TrimReport) -> None:
    for note in r.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{r.n_vocab} tokens, {r.n_kept} kept: {r.kept_special} special tokens and bytes, ", nl=False)
    typer.echo(
        f"{r.kept_corpus} of the corpus, {r.kept_listed} listed, {r.kept_intermediate} on the way to others, ", nl=False
    )
    typer.echo(f"{r.kept_filled} to fill up")
    if r.n_merges:
        typer.echo(f"{r.n_merges} merges, {r.n_merges_kept} kept")
    typer.echo(f"corpus: {r.corpus_tokens} tokens, {100 * r.corpus_covered:.2f} % of them kept", nl=r.path is None)
    if r.path is not None:
        typer.echo(f"; {r.checked_tokens} tokens checked, now {r.checked_tokens_after}")
    what = "would be" if r.path is None else str(r.path)
    ratio = r.size / r.source_size
    typer.echo(f"{what}: {r.size / MIB:.1f} MiB, {100 * ratio:.1f} % of {r.source_size / MIB:.1f} MiB")


def main() -> None:
    """Run the console script."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an exception: no partial output stays
    sys.exit(run(app, "gguf-trim-vocab"))


if __name__ == "__main__":
    main()
