"""Progress bars over bytes, on stderr: a bar for each part of the work on a terminal, a line now and then in a file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# Called with a part's name, the bytes of it that are done, and all its bytes.
Shown = Callable[[str, int, int], None]

_SECONDS = 10.0  # between two lines in a file
_MIB = 1 << 20


@contextlib.contextmanager
def byte_bars(quiet: bool = False) -> Iterator[Shown | None]:
    """Show progress bars; yields what to call as the work goes on, None if nothing is to be shown.

    Nothing appears before the first call: an error that comes at once is one line.
    """
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with contextlib.ExitStack() as stack:
            yield _bars(stack)
    else:
        yield _lines()


def _bars(stack: contextlib.ExitStack) -> Shown:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if not tasks:
            stack.enter_context(progress)
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total)
        progress.update(tasks[what], completed=done)

    return show


def _lines() -> Shown:
    said: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - said.get(what, -_SECONDS) >= _SECONDS:
            said[what] = now
            print(f"{what}: {done / _MIB:.1f} of {total / _MIB:.1f} MiB", file=sys.stderr, flush=True)

    return show
