"""One program that a model wrote, run confined, and what came of it."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.sandbox.child import SECONDS, Child, attempt, need_confinement
from tilebeam.sandbox.plain_data import as_json, frames

MOST_OUTPUT = 10_000


@dataclass(frozen=True)
class Run:
    """The outcome of a program. All texts are the program's own words, as long as they may be.

    Attributes:
        output: what it printed on stdout.
        value: the expression in its last line, as `repr` writes it; None if there is none, or its value is None.
        error: the end of the traceback, whose last line names the error, or why it was ended; "" if it came to its end.
        seconds: by the clock.
        cut: whether a text was longer than `max_output`.
        ended: whether its process ended before it came to its end: of a limit, by a crash or by itself.
    """

    output: str
    value: str | None
    error: str
    seconds: float
    cut: bool
    ended: bool = False

    @property
    def text(self) -> str:
        """Put output, value and error below each other, as a notebook shows them."""
        return "\n".join(t for t in (self.output.rstrip("\n"), self.value, self.error) if t)


def run(
    code: str,
    *,
    before: Sequence[str] = (),
    timeout: float = SECONDS,
    max_output: int = MOST_OUTPUT,
    unsafe: bool = False,
) -> Run:
    """Run a program and return what it prints, the value of the expression in its last line, and its error.

    It can compute, with the modules of Python that this takes, numpy and sympy where they are installed; files, network
    and other processes are out of its reach. It takes milliseconds to start. May be called from many threads; as many
    programs run at a time as there are CPUs, at most 8.

    Args:
        code: the program.
        before: programs that ran before it in the same notebook: they run again; what they print and raise is
            forgotten, their variables stay.
        timeout: seconds of CPU time for all of it, in whole ones; by the clock it may take ten times as long.
        max_output: characters of the output, of the value and of the error.
        unsafe: run it even where it cannot be confined.

    Raises:
        TilebeamError: it cannot be confined here, and `unsafe` is false; or an argument is out of range.
    """
    if not 0 < timeout < 1e6:
        raise TilebeamError(f"timeout must be seconds above 0, not {timeout!r}.")
    checked_integer("max_output", max_output)
    confined = need_confinement(unsafe=unsafe)
    return attempt(lambda: _once([*before, code], math.ceil(timeout), max_output, confined=confined))


def _once(blocks: list[str], seconds: int, most: int, *, confined: bool) -> Run:
    here, there = socket.socketpair()
    output, prints = socket.socketpair()
    began = time.monotonic()
    child = Child("\n".join(blocks), there, prints, confined=confined, seconds=seconds)
    with child, here, there, output, prints:
        there.close()
        prints.close()
        here.settimeout(child.patience)
        here.sendall(as_json({"blocks": blocks, "limit": most + 1}))
        # Texts that are cut there, of at most 4 bytes a character, or 10 for half of a surrogate pair.
        printed, said = child.hear({output: 4 * most + 4, here: 20 * most + 100})
    took = time.monotonic() - began
    text, value, error, ended = printed.decode("utf-8", "replace"), None, "", False
    match [raw.decode("utf-8", "replace") for raw in frames(said)]:
        case [found, error, *_]:
            value = found[1:] if found else None
        case _:
            error, ended = _why_ended(child, took), True
    cut = max(len(text), len(value or ""), len(error)) > most
    return Run(text[:most], None if value is None else value[:most], error[:most], took, cut, ended)


def _why_ended(child: Child, took: float) -> str:
    """Say why a program has ended that did not come to its end, as Python writes errors."""
    status, used = child.end()
    number = -os.waitstatus_to_exitcode(status)
    if took >= child.patience:
        return f"TimeoutError: the program did not end within {child.patience} seconds"
    if number == signal.SIGKILL and used > 0.9:  # limits are whole seconds
        return f"TimeoutError: the program took more than {math.floor(used + 0.1)} seconds"
    if number > 0:
        return f"RuntimeError: the program crashed ({signal.strsignal(number)})"
    return "RuntimeError: the program ended its process"
