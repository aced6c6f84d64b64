"""Ctrl-C while native code makes something that must be freed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interrupts:
    """Within its block an interrupt raises nothing: between native code's return and the next line of Python it would
    lose what was made. `check` does what it would have done, where nothing can be lost.

    Only in the main thread, which alone gets signals.
    """

    def __init__(self) -> None:
        self._came = False
        self._handler: Callable[[int, Any], Any] | None = None  # what it would have done

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if error is not None:
            self.check()

    @property
    def ends(self) -> bool:
        """True if an interrupt came that ends what is going on: native code need not go on, either."""
        return self._came and self._handler is signal.default_int_handler

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if there was one; or call whoever handles interrupts in this program."""
        if self._came and self._handler is not None:
            self._came = False
            self._handler(signal.SIGINT, None)

    def _note(self, *_: Any) -> None:
        self._came = True
