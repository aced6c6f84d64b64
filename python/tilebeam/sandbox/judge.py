"""The program of a judge's process: tests, in which the function's name stands for calls of a program in another
process.

The tests are in no memory that the program can read, nothing that the program does to its own interpreter changes what
they compare, and all that comes from it is plain data under the number of a call that is waiting for it. A judge says
what it found on a channel that the program does not have, one message for each thing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tilebeam.sandbox.plain_data import Json, decoded, encoded, receive, send

_LONGEST = 300  # characters of a text in a message


class _NoAnswer(BaseException):
    """A call came to nothing that a test could look at."""


class _Candidate:
    """The function of a program in another process.

    Attributes:
        unanswered: whether a call since this was last set to False came to nothing; a test may have caught that.
        forged: what is wrong with what the program's process said, "" if nothing is.
    """

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self.unanswered = False
        self.forged = ""

    def __call__(self, *positional: Any, **named: Any) -> Any:
        try:
            call = encoded(([*positional], named))
        except Exception as error:
            raise self._no_answer() from error
        return self._value(self._ask({"call": call}))

    def _iterator(self, place: int) -> Iterator[Any]:
        while True:
            reply = self._ask({"next": place})
            if "end" in reply:
                return
            yield self._value(reply)

    def _ask(self, question: Json) -> Json:
        number = os.urandom(8).hex()  # nobody can answer what was not asked yet
        try:
            send(self._channel, question | {"id": number})
            reply = receive(self._channel)
        except (ValueError, RecursionError) as error:
            raise self._forgery("what is no message") from error
        except Exception as error:  # it has ended
            raise self._no_answer() from error
        if not isinstance(reply, dict) or reply.get("id") != number:
            raise self._forgery("a reply to nothing that was asked")
        return reply

    def _value(self, reply: Json) -> Any:
        if "raised" in reply:
            raise self._exception(reply)
        if "value" not in reply:
            raise self._no_answer()
        try:
            return decoded(reply["value"], self._iterator)
        except Exception as error:
            raise self._forgery("a reply that is no data") from error

    def _exception(self, reply: Json) -> BaseException:
        """Make the exception that the function raised, as far as it is one that a test could expect."""
        name, text = str(reply["raised"]), str(reply.get("text"))
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            return self._forgery(f"an exception {name[:50]!r}")
        if not issubclass(kind, Exception):  # it ended the program
            return self._no_answer()
        if issubclass(kind, (StopIteration, StopAsyncIteration)):  # loops of the test would end as if all were well
            return RuntimeError(f"{name}: {text}")
        with contextlib.suppress(Exception):
            return kind(text)
        return RuntimeError(text)

    def _no_answer(self) -> _NoAnswer:
        self.unanswered = True
        return _NoAnswer()

    def _forgery(self, text: str) -> _NoAnswer:
        self.forged = self.forged or text
        return _NoAnswer()


def main(channel: int, verdicts: int) -> None:
    """Run the tests that the first message on `verdicts` brings.

    Writes to `verdicts` {"began": true} or {"error": text}; then {"test": its place, "passed": true or false} for each
    test; {"error": text} at any place takes all of it back; at the end {"done": true}.
    """
    request = receive(verdicts)
    try:
        began = receive(channel)
        error = "" if began == {"ready": True} else str(began["failed"])
    except (OSError, EOFError):
        error = "it ended before it defined the function"
    except Exception:
        error = "its process said what nobody asked"
    if error:
        send(verdicts, {"error": error[:_LONGEST]})
        return
    send(verdicts, {"began": True})
    candidate = _Candidate(channel)
    space: Json = {"__name__": "__tests__"}
    with contextlib.suppress(Exception):  # what stands before the function, for tests that use it
        exec(compile(request["setup"], "<setup>", "exec"), space)
    space[request["function"]] = space["candidate"] = candidate
    for place, test in enumerate(request["tests"]):
        candidate.unanswered = False
        passed = _passes(test, space) and not candidate.unanswered
        if candidate.forged:
            send(verdicts, {"error": f"its process sent {candidate.forged}"[:_LONGEST]})
            return
        send(verdicts, {"test": place, "passed": passed})
    send(verdicts, {"done": True})


def _passes(test: Json, space: Json) -> bool:
    """Run a test, and tell whether it passes: statements that raise nothing, or an expression with its expected value
    as text."""
    try:
        if "expected" not in test:
            exec(compile(test["source"], "<test>", "exec"), space)
            return True
        value = eval(compile(test["source"], "<example>", "eval"), space)
    except BaseException:
        return False
    expected: str = test["expected"]
    with contextlib.suppress(Exception):
        return bool(value == ast.literal_eval(expected))
    return "".join(repr(value).split()) == "".join(expected.split())
