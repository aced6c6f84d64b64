"""A progress bar over bytes, on stderr: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from .stream import Progress

_SECONDS = 10.0  # between two lines in a file
_MIB = 1 << 20


@contextlib.contextmanager
def byte_bar(what: str, quiet: bool = False) -> Iterator[Progress | None]:
    """Show a progress bar; yields what to call as the work goes on, None if nothing is to be shown.

    Nothing appears before the first call: an error that comes at once is one line.

    Args:
        what: how it begins.
    """
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _lines(what)
    else:
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        task = bar.add_task(what)

        def show(done: int, total: int) -> None:
            bar.start()
            bar.update(task, completed=done, total=total)

        try:
            yield show
        finally:
            if bar.live.is_started:
                bar.stop()


def _lines(what: str) -> Progress:
    said = -_SECONDS

    def show(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done == total or now - said >= _SECONDS:
            said = now
            print(f"{what}: {done / _MIB:.1f} of {total / _MIB:.1f} MiB", file=sys.stderr, flush=True)

    return show
