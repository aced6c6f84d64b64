"""Runs tensors through a function piece by piece: threads work ahead within a small window, order is kept."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

import numpy as np
from tilebeam._ext import TILE, cpus

from .errors import GGUFError
from .gguf_file import Bytes, TensorInfo
from .gguf_write import start_writeback
from .split import Source

# Size of one piece, about. Small where the values go through float arrays several times the source's size: with all
# threads at work a few dozen MiB are in memory.
COPY_BYTES = 1 << 21
PACK_ELEMENTS = 1 << 21
FLOAT_ELEMENTS = 1 << 18
MEMORY = 160 << 20  # bytes for all pieces together; very wide matrices get fewer threads

T = TypeVar("T")
R = TypeVar("R")

# progress(done bytes, total bytes) of what is read
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RowBlock:
    """Whole rows of a tensor, panels of them if they become tiles.

    Attributes:
        data: their bytes, uint8.
        k: elements of a row.
        rows: how many.
        out: as many bytes as ``data`` for what is made of it, if it has that size.
    """

    data: Bytes
    k: int
    rows: int
    out: Bytes


# consume(number of the tensor, offset in what is made of it, bytes)
Consume = Callable[[int, int, Bytes], None]
# What a piece becomes: all of it, in ``piece.out`` or in an array of its own.
Make = Callable[[RowBlock], Bytes]


@dataclass(frozen=True)
class TensorJob:
    """One tensor and what becomes of it.

    Attributes:
        make: None copies.
        floats: ``make`` needs the values as floats.
        one_digest: ``make`` gives the same bytes in another order, so that one digest does for both sides, of the bytes
            as "read" or as "made". Hashing costs more than everything else.
    """

    source: TensorInfo
    make: Make | None = None
    floats: bool = False
    one_digest: Literal["read", "made"] | None = None


def default_threads() -> int:
    """Return one per performance core that this process may use, at most 16."""
    return min(16, cpus.default_threads())


def in_order(pool: ThreadPoolExecutor, fn: Callable[[T], R], items: Iterable[T], window: int) -> Iterator[R]:
    """Run ``map``, which starts at most ``window`` items ahead of its consumer."""
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


def _step(job: TensorJob) -> int:
    """Return the bytes of a piece: whole panels of rows, or any bytes of a copy."""
    t = job.source
    if job.make is None:
        return min(COPY_BYTES, t.nbytes)
    elements = FLOAT_ELEMENTS if job.floats else PACK_ELEMENTS
    return min(max(1, elements // (t.k * TILE)) * TILE * t.row_bytes, t.nbytes)


def _footprint(job: TensorJob) -> int:
    """Return what a piece takes in bytes: itself, what is made of it, its values as floats, twice."""
    values = _step(job) // job.source.row_bytes * job.source.k * 16 if job.floats else 0
    return 2 * _step(job) + values


def pieces(file: Source, jobs: Sequence[TensorJob], threads: int) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Yield ``(index of the job, source bytes, output bytes)`` of all jobs' pieces, in order; valid until the next one.

    Raises:
        GGUFError: a tensor cannot be converted, or the file became shorter.
    """
    steps = [_step(job) for job in jobs]
    # Arrays are used again and again: fresh ones cost a page fault for every 4 KiB, a fifth of all time.
    free: list[Bytes] = []

    def room_for_piece() -> Bytes:
        try:
            return free.pop()
        except IndexError:
            return np.empty(max(steps), np.uint8)

    def work(item: tuple[int, int]) -> tuple[int, Bytes, Bytes, tuple[Bytes, ...]]:
        i, at = item
        t, make = jobs[i].source, jobs[i].make
        n = min(steps[i], t.nbytes - at)
        room = room_for_piece()
        data = room[:n]
        file.read_tensor(t, at, data)
        if make is None:
            return i, data, data, (room,)
        result = room_for_piece()
        try:
            made = make(RowBlock(data, t.k, n // t.row_bytes, result[:n]))
        except ValueError as e:
            raise GGUFError(f"tensor {t.name!r} ({t.type.name}) cannot be converted: {e}") from e
        return i, data, made, (room, result)

    threads = max(1, min(threads, MEMORY // max(map(_footprint, jobs), default=1) - 2))
    with ThreadPoolExecutor(threads, "gguf") as pool:
        items = ((i, at) for i, job in enumerate(jobs) for at in range(0, job.source.nbytes, steps[i]))
        for i, data, made, used in in_order(pool, work, items, threads + 1):
            yield i, data, made
            free.extend(used)


@dataclass(frozen=True)
class Digests:
    """SHA-256 of each tensor's bytes, in order: as read and as made; equal for jobs with one digest."""

    source: list[bytes]
    output: list[bytes]


def run(
    file: Source,
    jobs: Sequence[TensorJob],
    consume: Consume | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Digests:
    """Make all tensors; ``consume`` gets them in order, if there is one; hash both sides.

    Output offsets within a tensor count the bytes made so far.

    Raises:
        GGUFError: a tensor cannot be converted, or the file was changed meanwhile.
    """
    total, done = sum(j.source.nbytes for j in jobs), 0
    reads = [hashlib.sha256() for _ in jobs]
    makes = [reads[i] if j.make is None or j.one_digest else hashlib.sha256() for i, j in enumerate(jobs)]
    made = [0] * len(jobs)
    if progress:
        progress(0, total)
    with ThreadPoolExecutor(2, "sha256") as hashing:
        for i, data, out in pieces(file, jobs, threads or default_threads()):
            hashed = [hashing.submit(reads[i].update, (out if jobs[i].one_digest == "made" else data).data)]
            if makes[i] is not reads[i]:
                hashed.append(hashing.submit(makes[i].update, out.data))
            if consume is not None:
                consume(i, made[i], out)
            for h in hashed:
                h.result()
            made[i] += out.size
            done += data.size
            if progress:
                progress(done, total)
    file.require_unchanged()
    return Digests([h.digest() for h in reads], [h.digest() for h in makes])


def write_at(f: BinaryIO, offsets: Sequence[int]) -> Consume:
    """Make a consumer for :func:`run` that writes each tensor at its absolute offset."""

    def consume(i: int, at: int, data: Bytes) -> None:
        f.seek(offsets[i] + at)
        f.write(data.data)
        start_writeback(f.fileno(), offsets[i] + at, data.size)

    return consume
