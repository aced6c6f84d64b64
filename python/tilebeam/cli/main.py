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
    cache,
    chat,
    doctor,
    draft,
    evaluate,
    generate,
    reward,
    reward_head,
    search,
    serve,
    trace,
)
from tilebeam.cli.commands import Command, prepared
from tilebeam.gguf.help_text import App

app = App(
    Command,
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


_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Ask a model": {"chat": chat.chat, "generate": generate.generate},
    "Search for a better answer": {
        "vote": search.vote,
        "best-of-n": search.best_of_n,
        "adaptive": search.adaptive,
        "beam": search.beam,
        "dvts": search.dvts,
        "tir": search.tir,
    },
    "Serve": {"serve": serve.serve},
    "Measure": {"eval": evaluate.evaluate, "bench": bench.bench, "trace": trace.trace},
    "Models and files": {
        "doctor": doctor.doctor,
        "cache": cache.cache,
        "reward-head": reward_head.reward_head,
    },
}
for _heading, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_heading)(prepared(_command))
app.add_typer(reward.app, name="reward", rich_help_panel=_heading)
app.add_typer(draft.app, name="draft", rich_help_panel=_heading)


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Send a signal again a moment after Python dropped it: it drops what is raised in a C library's callback, such as
    llama.cpp's for log lines, and the program would go on."""
    if isinstance(dropped.exc_value, SystemExit | KeyboardInterrupt):
        number = signal.SIGTERM if isinstance(dropped.exc_value, SystemExit) else signal.SIGINT
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(dropped)


def main() -> None:
    """Run the console script."""
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
