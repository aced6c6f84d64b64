"""The program of a confined process: a model's program, and the little that tells others of it.

Everything here is in the program's hands, which may call, change or imitate it; so whoever reads what comes out takes
it for the program's own words. Nothing but the program, and one by one the calls of its function, is ever sent here.
"""

from __future__ import annotations

import ast
import io
import linecache
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tilebeam.sandbox.plain_data import Json, decoded, encoded, framed, receive, send, write

_NAME = "<program>"  # of the last block; those before it have a number behind
_FRAMES = 4  # of a traceback, the last
_LINE = 200  # characters of a line in it
_ERROR = 1000  # characters of an error's text


def main(channel: int) -> None:
    """Do what the first message says: run a program once, or answer calls of its function until nobody asks."""
    request = receive(channel)
    if "function" in request:
        _answer(request, channel)
    else:
        _run(request, channel)


def _module(name: str) -> dict[str, Any]:
    """Make a new module, in which libraries look for the program's names."""
    module = sys.modules[name] = ModuleType(name)
    return vars(module)


# --- a function that is asked -----------------------------------------------------------------------------------------


def _answer(request: Json, channel: int) -> None:
    space = _module("__program__")
    try:
        exec(compile(request["source"], _NAME, "exec"), space)
    except BaseException as error:
        send(channel, {"failed": f"{type(error).__name__}: {error}"[:_ERROR]})
        return
    if request["function"] not in space:
        send(channel, {"failed": f"it defines no {request['function']}"})
        return
    send(channel, {"ready": True})
    function = space[request["function"]]
    iterators: list[Iterator[Any]] = []
    while True:
        call = receive(channel)
        reply = _outcome(function, call, iterators)
        try:
            send(channel, {"id": call["id"]} | reply)
        except (ValueError, RecursionError, MemoryError) as error:
            send(channel, {"id": call["id"], "unfit": str(error)})


def _outcome(function: Any, call: Json, iterators: list[Iterator[Any]]) -> Json:
    """Make a call, or ask an iterator that a call returned for its next value, and describe what came of it."""
    try:
        if "next" in call:
            value = next(iterators[call["next"]], iterators)
            if value is iterators:
                return {"end": True}
        else:
            positional, named = decoded(call["call"])
            value = function(*positional, **named)
    except BaseException as error:
        # Tests know only the exceptions of Python itself.
        kind = next(k.__name__ for k in type(error).__mro__ if k.__module__ == "builtins")
        return {"raised": kind, "text": str(error)[:_ERROR]}
    try:
        return {"value": encoded(value, iterators)}
    except Exception as error:
        return {"unfit": str(error)[:_ERROR]}


# --- a program that runs once -----------------------------------------------------------------------------------------


def _run(request: Json, channel: int) -> None:
    """Run blocks of source one after the other, as a notebook does. Only of the last one output, value and error count.

    Sends two texts: the value of the last expression behind a "+", or "" if there is none; the error.
    """
    *before, last = request["blocks"]
    space, limit = _module("__main__"), request["limit"]
    sys.stdout = _stdout(0)
    for number, source in enumerate(before, 1):
        _block(source, f"{_NAME[:-1]} {number}>", space)
    sys.stdout = _stdout(4 * limit)
    value, error = _block(last, _NAME, space)
    text = ""
    if value is not None:
        try:
            text = f"+{value!r}"
        except BaseException as caught:
            error = _in_words(caught)
    for said in (text[: limit + 1], error[:limit]):
        write(channel, framed(said.encode("utf-8", "backslashreplace")))


def _block(source: str, name: str, space: dict[str, Any]) -> tuple[Any, str]:
    """Run a block; returns the value of the expression at its end, if there is one, and the error, if there was one."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        end = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        if isinstance(end, ast.Expr):
            return eval(compile(ast.Expression(end.value), name, "eval"), space), ""
    except SystemExit:
        return None, ""
    except BaseException as error:
        return None, _in_words(error)
    return None, ""


def _in_words(error: BaseException) -> str:
    """Format the end of a traceback, without the frames of libraries: programs know neither their files nor their
    lines."""
    told = traceback.TracebackException.from_exception(error)
    frames = [f for f in told.stack if f.filename.startswith(_NAME[:-1])][-_FRAMES:]
    lines = [f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {(f.line or "")[:_LINE]}\n' for f in frames]
    begin = ["Traceback (most recent call last):\n"] if lines else []
    return "".join([*begin, *lines, *told.format_exception_only()]).rstrip("\n")


def _stdout(most: int) -> io.TextIOWrapper:
    """Make the file that `print` writes to: so many bytes come through, the rest takes nobody's time but the
    program's."""
    return io.TextIOWrapper(_Beginning(most), encoding="utf-8", errors="backslashreplace", write_through=True)


class _Beginning(io.RawIOBase):
    name = "<stdout>"

    def __init__(self, most: int) -> None:
        self._left = most

    def writable(self) -> bool:
        return True

    def write(self, raw: Any) -> int:
        kept = bytes(raw[: self._left])
        self._left -= len(kept)
        write(1, kept)
        return len(raw)
