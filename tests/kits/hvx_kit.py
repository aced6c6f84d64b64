"""Talks to the program of tests/hexagon/hvx_cases.cpp: kernels by request, on qemu-hexagon or emulated on the host."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt

from bench.lib.built import built

Array = npt.NDArray[np.generic]


class Op(IntEnum):
    """What can be asked for; the order is that of the enum in hvx_cases.cpp."""

    GEMM = 0
    DEQUANTIZE = 1
    TILES = 2
    EXP2 = 3
    TO_HALF = 4
    TO_FLOAT = 5
    ROUND = 6
    INTRINSIC = 7
    FP16 = 8
    ATTENTION = 9


PORTABLE, HVX = 0, 1


@dataclass(frozen=True)
class Request:
    """One call of one kernel: parameters as hvx_cases.cpp describes them, operands one after another."""

    op: Op
    set: int = HVX
    params: Sequence[int] = ()
    operands: Sequence[Array] = field(default_factory=tuple)

    def encode(self) -> bytes:
        """The request on the wire."""
        body = b"".join(a.tobytes() for a in self.operands)
        params = [p & 0xFFFFFFFF for p in self.params] + [0] * (5 - len(self.params))
        return struct.pack("<8I", self.op, self.set, *params, len(body)) + body


def ask(command: Sequence[str], requests: Sequence[Request], timeout: float = 300) -> list[bytes]:
    """Start the program once, send all requests, return all answers.

    Raises:
        RuntimeError: it rejected a request or died.
    """
    data = b"".join(r.encode() for r in requests)
    result = subprocess.run(list(command), input=data, capture_output=True, timeout=timeout, check=False)
    answers, at = [], 0
    while at < len(result.stdout):
        (size,) = struct.unpack_from("<I", result.stdout, at)
        answers.append(result.stdout[at + 4 : at + 4 + size])
        at += 4 + size
    if result.returncode != 0 or len(answers) != len(requests):
        text = result.stderr.decode(errors="replace")[-2000:]
        raise RuntimeError(
            f"{command[-1]}: status {result.returncode}, {len(answers)} of {len(requests)} answers: {text}"
        )
    return answers


def missing() -> str | None:
    """Why the program cannot be run here; None if it can."""
    try:
        built("hexagon/hvx_cases")
    except FileNotFoundError:
        return "this build has no hexagon/hvx_cases: it needs clang-19, lld-19 and libc++-19-dev"
    return None if emulator() else "qemu-hexagon is not installed (package qemu-user)"


def emulator() -> str | None:
    return os.environ.get("TILEBEAM_QEMU_HEXAGON") or shutil.which("qemu-hexagon")


def command() -> list[str]:
    return [emulator() or "qemu-hexagon", str(built("hexagon/hvx_cases"))]


@cache
def command_v73() -> list[str] | None:
    """How to start the program with the integer kernels compiled for v73; None where QEMU knows no such CPU, or did not
    when the program would have been built."""
    try:
        program = built("hexagon/hvx_cases_v73")
    except FileNotFoundError:
        return None
    qemu = emulator()
    if (
        qemu is None
        or "v73" not in subprocess.run([qemu, "-cpu", "help"], capture_output=True, text=True, check=False).stdout
    ):
        return None
    return [qemu, "-cpu", "v73", str(program)]
