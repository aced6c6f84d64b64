"""The process behind `tilebeam.answers.code_check`: runs programs that a model wrote, each in a process of its own.

For every request it forks twice. One child is the program: it runs the source and then answers calls of its function.
The other judges: it runs the tests, in which the function's name stands for calls of the first child. So the tests are
in no memory that the program can read, nothing that the program does to its own interpreter changes what they compare,
and a program that ends early has failed. Arguments and results go between the two as plain data. Both children are
confined (see `confinement`) unless the request says otherwise.

A request is a line with two lengths, then as many bytes of JSON: the program, and after the fork the tests.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tilebeam.sandbox.confinement import confine, limit

# Programs cannot open files, so what they may import is imported here, before they exist.
_MODULES = (
    "_strptime abc array base64 binascii bisect calendar cmath collections collections.abc contextlib copy dataclasses "
    "datetime decimal difflib enum fractions functools hashlib heapq io itertools json keyword locale math numbers "
    "operator pprint queue random re secrets statistics string struct textwrap time traceback types typing unicodedata "
    "warnings encodings.ascii encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.idna"
)
_LONGEST = 64 << 20  # bytes of a message between the children

Json = dict[str, Any]


# --- plain data -------------------------------------------------------------------------------------------------------


def encoded(value: Any) -> Any:
    """A value as JSON: what has no form there is an object with one key. Subclasses lose what they add.

    Raises:
        TypeError: it is not data.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [encoded(v) for v in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encoded(k), encoded(v)] for k, v in dict.items(value)]}
    for name, other in _COLLECTIONS.items():
        if isinstance(value, other):
            return {name: [encoded(v) for v in other.__iter__(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(bytes(value))}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decoded(value: Any) -> Any:
    """What `encoded` made JSON of."""
    if isinstance(value, list):
        return [decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "dict":
        return {decoded(k): decoded(v) for k, v in content}
    if name == "complex":
        return complex(*content)
    return _COLLECTIONS[name](decoded(content)) if name in _COLLECTIONS else bytes(content)


_COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _send(pipe: int, message: Any) -> None:
    raw = json.dumps(message).encode()
    raw = len(raw).to_bytes(8) + raw
    while raw:
        raw = raw[os.write(pipe, raw) :]


def _receive(pipe: int) -> Any:
    length = int.from_bytes(_exactly(pipe, 8))
    if length > _LONGEST:
        raise ValueError("the message is too long")
    return json.loads(_exactly(pipe, length))


def _exactly(pipe: int, length: int) -> bytes:
    raw = bytearray()
    while len(raw) < length:
        piece = os.read(pipe, min(length - len(raw), 1 << 20))
        if not piece:
            raise EOFError("the program has ended")
        raw += piece
    return bytes(raw)


# --- the two children -------------------------------------------------------------------------------------------------


def _program(request: Json, calls: int, results: int) -> None:
    """Run the source, then answer calls."""
    space: Json = {"__name__": "__program__"}
    try:
        exec(compile(request["program"], "<program>", "exec"), space)
        function = space[request["entry"]]
    except KeyError:
        _send(results, {"failed": f"it defines no {request['entry']}"})
        return
    except BaseException as error:
        _send(results, {"failed": _in_words(error)})
        return
    _send(results, {"ready": True})
    while True:
        positional, named = decoded(_receive(calls))
        try:
            _send(results, {"value": encoded(function(*positional, **named))})
        except BaseException as error:
            _send(results, {"raised": type(error).__name__, "text": str(error)[:1000]})


def _judge(request: Json, calls: int, results: int, verdicts: int) -> None:
    """Run the tests, one after the other; writes a line for each: 1 for passed."""

    def candidate(*positional: Any, **named: Any) -> Any:
        _send(calls, encoded(([*positional], named)))
        reply = _receive(results)
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else RuntimeError)(reply["text"])  # type: ignore[misc]
        return decoded(reply["value"])

    began = _receive(results)
    if "ready" not in began:
        os.write(verdicts, f"-{began.get('failed')}\n".encode())
        return
    os.write(verdicts, b"+\n")
    space: Json = {"__name__": "__tests__"}
    with contextlib.suppress(Exception):  # what stands before the function, for tests that use it
        exec(compile(request["setup"], "<setup>", "exec"), space)
    space[request["entry"]] = space["candidate"] = candidate
    for test in request["tests"]:
        os.write(verdicts, b"1\n" if _passes(test, space) else b"0\n")


def _passes(test: Json, space: Json) -> bool:
    """Whether a test passes: statements that raise nothing, or an expression with its expected value as text."""
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


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# --- the parent -------------------------------------------------------------------------------------------------------


def _child(run: Callable[..., None], request: Json, *pipes: int) -> int:
    """Fork a child that runs a function with no other descriptors than these, limited and confined."""
    pid = os.fork()
    if pid:
        return pid
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        kept = sorted(pipes)
        for low, high in zip([2, *kept], [*kept, 1 << 16], strict=True):
            os.closerange(low + 1, high)
        limit(request["memory"], request["seconds"])
        if request["confined"]:
            sys.path[:] = []
            confine()
        run(request, *pipes)
    finally:
        os._exit(0)


def answer(read: Callable[[int], Json], lengths: list[int]) -> Json:
    """Do a request.

    Returns:
        "passed", for each test; "error", why the program does not even start, or "".
    """
    request = read(lengths[0])
    calls, results, verdicts = os.pipe(), os.pipe(), os.pipe()
    pids = [_child(_program, request, calls[0], results[1])]
    tests = request | read(lengths[1])
    pids.append(_child(_judge, tests, calls[1], results[0], verdicts[1]))
    for pipe in (*calls, *results, verdicts[1]):
        os.close(pipe)
    said = _until(verdicts[0], time.monotonic() + request["patience"])
    os.close(verdicts[0])
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    first, *rest = said.decode("utf-8", "replace").split("\n")
    passed = [mark == "1" for mark in rest[: len(tests["tests"])]]
    passed += [False] * (len(tests["tests"]) - len(passed))
    return {"passed": passed, "error": "" if first == "+" else first[1:] or "it ended, or took too long"}


def _until(pipe: int, deadline: float) -> bytes:
    """What comes through a pipe until it is closed, or time is up."""
    said = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        piece = os.read(pipe, 65536)
        if not piece:
            break
        said += piece
    return said


def confinement() -> str:
    """Why children cannot be confined here, "" if they can: tried, not assumed."""
    pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limit(1 << 29, 10)
            confine()
            try:
                os.open("/", os.O_RDONLY)
                os.write(pipe[1], b"the filter has no effect")
            except PermissionError:
                os.write(pipe[1], b"+")
        except BaseException as error:
            os.write(pipe[1], _in_words(error).encode())
        finally:
            os._exit(0)
    os.close(pipe[1])
    said = _until(pipe[0], time.monotonic() + 10)
    os.close(pipe[0])
    os.waitpid(pid, 0)
    return "" if said == b"+" else said.decode() or "the filter ends the process"


def main() -> None:
    """Answer until the input ends."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.set_int_max_str_digits(0)
    for name in _MODULES.split():
        __import__(name)
    os.write(replies, json.dumps({"ready": True, "unconfined": confinement()}).encode() + b"\n")
    while True:
        header = b""
        while not header.endswith(b"\n"):  # byte by byte: what follows is read when its time has come
            header += (byte := os.read(0, 1))
            if not byte:
                return
        reply = answer(lambda length: json.loads(_exactly(0, length)), [int(n) for n in header.split()])
        os.write(replies, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
