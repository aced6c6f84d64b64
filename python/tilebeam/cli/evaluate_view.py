"""What `tilebeam eval` shows: bars while it runs, tables when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markdown import Markdown

from tilebeam.cli import console
from tilebeam.evaluation.eval_report import EvalReport, markdown
from tilebeam.evaluation.runner import Watcher
from tilebeam.outputs import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Bars(Watcher):
    """A bar per phase with rate and time left."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._batch = ""
        self._total = self._done = self._before = self._under_way = 0
        self._began = 0.0

    @contextmanager
    def phase(self, name: str, total: int, done: int) -> Iterator[None]:
        """See `Watcher.phase`."""
        self._total, self._done, self._before, self._batch = total, done, done, ""
        self._began = time.monotonic()
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

    def _pace(self) -> str:
        seconds = time.monotonic() - self._began
        done = self._done + self._under_way
        rate = (done - self._before) / seconds if seconds > 0 else 0.0
        return f"{rate * 60:.3g} a minute, {(self._total - done) / rate / 60:.0f} min left" if rate > 0 else ""

    def _show(self, note: str) -> None:
        if self._bar is not None:
            [task] = self._bar.task_ids
            shown = ", ".join(filter(None, (self._pace(), note)))
            self._bar.update(task, completed=self._done + self._under_way, note=shown)


def show(report: EvalReport, out: Path) -> None:
    """Show tables on a terminal; write Markdown as it is into a pipe."""
    screen = console.out()
    text = "\n".join(markdown(report))
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        print(text)
    console.err().print(f"{out}/report.md, report.json, results.jsonl, plots", style="dim")
