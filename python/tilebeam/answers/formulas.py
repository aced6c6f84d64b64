"""Mathematical answers, found and compared by the math-verify library (the extra "math")."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec

from tilebeam.answers.extract import framed
from tilebeam.answers.normalize import faithful_math
from tilebeam.answers.numbers import with_commas
from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install
from tilebeam.sandbox.worker_process import WorkerProcess


class MathAnswer:
    r"""Finds mathematical answers (boxed LaTeX, LaTeX between dollars, or the last number or fraction), and knows which
    of them are equal: 0.5, \frac{1}{2} and 2/4 are, (x+1)^2 and x^2+2x+1 are.

    May be used from any thread. math-verify runs in a process of its own, which all instances share; an expression
    that keeps it busy for longer than `timeout` is no answer, and equals nothing.

    Args:
        timeout: seconds.

    Raises:
        TilebeamError: math-verify is not installed.
    """

    def __init__(self, *, timeout: int = 5) -> None:
        if find_spec("math_verify") is None:
            raise TilebeamError(f"Mathematical answers need the math-verify library: {how_to_install('math')}")
        if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 1:
            raise TilebeamError(f"timeout must be a whole number of seconds of at least 1, not {timeout!r}.")
        self.timeout = timeout

    def __call__(self, text: str) -> str | None:
        """Extract the answer of the text, as `faithful_math` writes it: the last box whose braces close, else what
        math-verify finds; None if it finds nothing."""
        found = framed(text) or _extract(with_commas(text).replace("\N{MINUS SIGN}", "-"), self.timeout)
        return (faithful_math(found) or None) if found is not None else None

    def equal(self, a: str, b: str) -> bool:
        """Tell whether two answers are the same."""
        a, b = sorted(map(faithful_math, (a, b)))
        return a == b or _equal(a, b, self.timeout)


@lru_cache(maxsize=4096)
def _extract(text: str, timeout: int) -> str | None:
    reply = _ask({"text": text, "timeout": timeout}, timeout)
    return reply if isinstance(reply, str) else None


@lru_cache(maxsize=4096)
def _equal(a: str, b: str, timeout: int) -> bool:
    return _ask({"a": a, "b": b, "timeout": timeout}, 2 * timeout) is True


_WORKER = WorkerProcess(["tilebeam.answers.math_worker"], "mathematical answers")


def _ask(request: dict[str, str | int], seconds: float) -> str | bool | None:
    """Send a request and return the reply, None if none came. The process's own timeouts come first where they can."""
    reply = _WORKER.ask(json.dumps(request).encode() + b"\n", 2 * seconds + 5)
    answer: str | bool | None = None if reply is None else reply["reply"]
    return answer
