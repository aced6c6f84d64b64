"""Runs tensors through a function piece by piece: threads work ahead within a small window, order is kept."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from ggml_ext import TILE

from .gguf_file import Bytes, TensorInfo
from .split import Source
from .weights import refuse

ELEMENTS = 1 << 21  # of one piece, about; whole panels
COPY_BYTES = 1 << 22

T = TypeVar("T")
R = TypeVar("R")

# progress(done bytes, total bytes) of what is read
Progress = Callable[[int, int], None]
# (data of whole rows, K, rows, number of the first row) -> output bytes
Make = Callable[[Bytes, int, int, int], Bytes]


@dataclass(frozen=True)
class Job:
    """One tensor and what becomes of it; ``make`` None copies."""

    source: TensorInfo
    make: Make | None = None


def default_threads() -> int:
    """One per CPU this process may use, at most 16."""
    return min(16, len(os.sched_getaffinity(0)))


def in_order(pool: ThreadPoolExecutor, fn: Callable[[T], R], items: Iterable[T], window: int) -> Iterator[R]:
    """``map`` that starts at most ``window`` items ahead of its consumer."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(fn, item))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for f in waiting:
            f.cancel()


def _pieces(job: Job) -> Iterator[tuple[int, int]]:
    """``(offset in the tensor, bytes)``: whole panels of rows, or any bytes of a copy."""
    t = job.source
    step = COPY_BYTES
    if job.make is not None:
        step = max(1, ELEMENTS // (t.k * TILE)) * TILE * t.row_bytes
    for at in range(0, t.nbytes, step):
        yield at, min(step, t.nbytes - at)


def pieces(file: Source, jobs: Sequence[Job], threads: int) -> Iterator[tuple[int, Bytes, Bytes]]:
    """``(index of the job, source bytes, output bytes)`` of all jobs' pieces, in order.

    Raises:
        GGUFError: a tensor cannot be converted, or the file became shorter.
    """

    def work(item: tuple[int, int, int]) -> tuple[int, Bytes, Bytes]:
        i, at, n = item
        t, make = jobs[i].source, jobs[i].make
        data = file.read_tensor(t, at, n)
        if make is None:
            return i, data, data
        try:
            return i, data, make(data, t.k, n // t.row_bytes, at // t.row_bytes)
        except ValueError as e:
            raise refuse(t, e) from e

    with ThreadPoolExecutor(threads, "gguf") as pool:
        items = ((i, at, n) for i, job in enumerate(jobs) for at, n in _pieces(job))
        yield from in_order(pool, work, items, threads + 1)


@dataclass(frozen=True)
class Digests:
    """SHA-256 of each tensor's bytes, in order: as read and as made."""

    source: list[bytes]
    output: list[bytes]


def run(
    file: Source,
    jobs: Sequence[Job],
    consume: Callable[[int, int, Bytes], None],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Digests:
    """Make all tensors; ``consume(index, offset in the output, bytes)`` gets them in order; hash both sides.

    Output offsets within a tensor count the bytes made so far.

    Raises:
        GGUFError: a tensor cannot be converted, or the file was changed meanwhile.
    """
    total, done = sum(j.source.nbytes for j in jobs), 0
    reads = [hashlib.sha256() for _ in jobs]
    makes = [reads[i] if j.make is None else hashlib.sha256() for i, j in enumerate(jobs)]
    made = [0] * len(jobs)
    if progress:
        progress(0, total)
    with ThreadPoolExecutor(2, "sha256") as hashing:
        for i, data, out in pieces(file, jobs, threads or default_threads()):
            hashed = [hashing.submit(reads[i].update, data.data)]
            if makes[i] is not reads[i]:
                hashed.append(hashing.submit(makes[i].update, out.data))
            consume(i, made[i], out)
            for h in hashed:
                h.result()
            made[i] += out.size
            done += data.size
            if progress:
                progress(done, total)
    file.require_unchanged()
    return Digests([h.digest() for h in reads], [h.digest() for h in makes])


def write_at(f: BinaryIO, offsets: Sequence[int | None]) -> Callable[[int, int, Bytes], None]:
    """A consumer for :func:`run` that writes each tensor at its absolute offset, if it has one."""

    def consume(i: int, at: int, data: Bytes) -> None:
        offset = offsets[i]
        if offset is not None:
            f.seek(offset + at)
            f.write(data.data)

    return consume
