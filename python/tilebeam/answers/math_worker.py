"""The process behind `tilebeam.MathAnswer`: math-verify, one request per line of JSON.

In a process of its own because some expressions take longer than anybody waits and cannot be interrupted within
Python, because math-verify's timeouts are signals, which only a main thread may have, and because sympy is large.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

# Of address space: an expression that needs more is no answer.
_MEMORY = 4 << 30


@lru_cache(maxsize=4096)
def _found(text: str, timeout: int) -> list[Any]:
    """Parse a text with math-verify: an expression and its spelling, or nothing."""
    from math_verify import parse

    return list(parse(text, parsing_timeout=timeout))


def extract(text: str, timeout: int) -> str | None:
    """Return the spelling of a text's answer."""
    spelled = [item for item in _found(text, timeout) if isinstance(item, str)]
    return spelled[-1] if spelled else None


def equal(a: str, b: str, timeout: int) -> bool:
    """Tell whether two answers are the same; to math-verify one of them is the right one, and here none is."""
    from math_verify import verify

    one, other = (_found(f"\\boxed{{{x}}}", timeout) or _found(x, timeout) for x in (a, b))
    return bool(verify(one, other, timeout_seconds=timeout) or verify(other, one, timeout_seconds=timeout))


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing that a library prints may stand among them
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    equal("1/2", "0.5", 60)  # libraries are loaded and grammars built now, not within a request's time
    answers.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # By default this signal ends the process, whatever Python is doing, also if the asker died. CPU seconds.
        signal.setitimer(signal.ITIMER_PROF, 3 * request["timeout"] + 2)
        reply: str | bool | None = None
        with contextlib.suppress(Exception):  # sympy has many, and whatever they are, this is no answer, equals nothing
            reply = extract(**request) if "text" in request else equal(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps({"reply": reply}).encode() + b"\n")


if __name__ == "__main__":
    main()
