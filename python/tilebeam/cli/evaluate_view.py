"""The bars of `tilebeam eval`, and of others that go on item by item."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tilebeam.cli import console
from tilebeam.evaluation.runner import Watcher
from tilebeam.outputs import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Bars(Watcher):
    """A bar per phase."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._batch = ""
        self._done = self._under_way = 0

    @contextmanager
    def phase(self, name: str, total: int, done: int) -> Iterator[None]:
        """See `Watcher.phase`."""
        self._done, self._batch = done, ""
        with console.bar(name) as self._bar:
            self._bar.add_task("", total=total, completed=done, note="")
            yield
        self._bar = None

    def batch(self, pieces: int, state: Progress) -> None:
        """Show how fast tokens come, and how many of the items have all their samples."""
        speed = state.tokens / state.seconds if state.seconds > 0 else 0.0
        self._under_way = pieces * state.finished // max(1, state.total)
        self._batch = f"{state.running} running, {speed:.0f} t/s"
        self._show(self._batch)

    def finished(self, pieces: int, note: str = "") -> None:
        """Move the bar on."""
        self._done, self._under_way = self._done + pieces, 0
        self._show(note or self._batch)

    def note(self, text: str) -> None:
        """Print a line to stderr."""
        screen = console.err() if self._bar is None else self._bar.console
        screen.print(text, style="dim", highlight=False)

    def _show(self, note: str) -> None:
        if self._bar is not None:
            [task] = self._bar.task_ids
            self._bar.update(task, completed=self._done + self._under_way, note=note)
