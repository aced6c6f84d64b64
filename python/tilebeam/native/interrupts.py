"""Ctrl-C while native code makes something that must be freed."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Interrupts:
    """Within its block an interrupt raises nothing: between native code's return and the next line of Python it would
    lose what was made. Who loops there looks at `came` and ends; `check` raises what came.

    Only in the main thread, which alone gets signals, and where nobody else handles them.
    """

    came = False
    _before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:
                self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if error is not None:
            self.check()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if there was one."""
        if self.came:
            raise KeyboardInterrupt

    def _note(self, *_: Any) -> None:
        self.came = True
