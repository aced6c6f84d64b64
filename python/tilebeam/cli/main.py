"""The `tilebeam` command: a module for each command, or for those that belong together.

Options have llama.cpp's names where it has them; those that several commands share are in `options`. What the commands
do is in the library, imported when needed so that `--help` is quick and needs no native library.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from tilebeam.cli import (
    bench,
    chat,
    console,
    diff,
    doctor,
    evaluate,
    generate,
    imatrix,
    perplexity,
    reward,
    score,
    search,
    serve,
    trace,
)
from tilebeam.gguf.help_text import App

app = App(
    name="tilebeam",
    help="Test-time scaling for GGUF models on local hardware. Start with: tilebeam doctor",
    no_args_is_help=True,
)


def _version(value: bool) -> None:
    if value:
        from tilebeam._version import __version__

        typer.echo(f"tilebeam {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


_COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor.doctor,
    "chat": chat.chat,
    "generate": generate.generate,
    "best-of-n": search.best_of_n,
    "vote": search.vote,
    "beam": search.beam,
    "dvts": search.dvts,
    "adaptive": search.adaptive,
    "tir": search.tir,
    "bench": bench.bench,
    "perplexity": perplexity.perplexity,
    "imatrix": imatrix.imatrix,
    "diff": diff.diff,
    "trace": trace.trace,
    "score": score.score,
    "reward-head": score.reward_head,
    "eval": evaluate.evaluate,
    "serve": serve.serve,
}
for _name, _command in _COMMANDS.items():
    # As diff(1) has it, 1 says that something differs.
    app.command(_name)(console.sentences(_command, status=2 if _name == "diff" else 1))
app.add_typer(reward.app, name="reward")


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised in a C library's callback, such as llama.cpp's for log lines. Where a signal raised
    it, send that again a moment later, or the program would go on."""
    if isinstance(dropped.exc_value, SystemExit | KeyboardInterrupt):
        number = signal.SIGTERM if isinstance(dropped.exc_value, SystemExit) else signal.SIGINT
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(dropped)


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an exception: no partial output stays
    sys.unraisablehook = _send_again
    try:
        app()
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is wrong.
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
