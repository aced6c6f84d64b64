"""Logits at chosen positions of given texts: what reward models and likelihood scores are made of.

Texts that begin with tokens already in the cache (kept sequences, see `Engine.keep`, or other texts of the same call)
fork those cells, so a text that grew by a step costs the step's tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilebeam import kv
from tilebeam.engine import Engine
from tilebeam.errors import TilebeamError

ReadHook = Callable[[int, int], object]

# A text waits for another of the same call if that saves at least this many tokens.
_SHARE_AT_LEAST = 16


@dataclass
class Reading:
    """What was read of one text.

    Attributes:
        logits: float32 [positions, tokens], in the order asked for.
        decoded_tokens: that went through the model.
        cached_tokens: that were in the cache.
        seconds: inside llama_decode, this text's share.
    """

    logits: npt.NDArray[np.float32]
    decoded_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Job:
    target: list[int]
    rows: dict[int, list[int]]  # position -> rows of the result
    out: Reading
    seq: kv.Sequence | None = None
    done: int = 0
    flagged: list[tuple[int, int]] = field(default_factory=list)  # (batch entry, position)


def read(
    engine: Engine,
    targets: Sequence[list[int]],
    positions: Sequence[Sequence[int]],
    tokens: Sequence[int] | None,
    hook: ReadHook | None = None,
) -> list[Reading]:
    """See `LM.read`. The engine must be idle."""
    if len(targets) != len(positions):
        raise TilebeamError(f"{len(targets)} texts but {len(positions)} lists of positions.")
    size = engine.vocab.size
    wanted = None if tokens is None else np.asarray(tokens, np.int64)
    if wanted is not None and wanted.size and not (wanted.min() >= 0 and wanted.max() < size):
        raise TilebeamError(f"Tokens must lie between 0 and {size - 1}.")
    jobs = []
    for target, where in zip(targets, positions, strict=True):
        engine.check(target)
        rows: dict[int, list[int]] = {}
        for row, position in enumerate(where):
            at = position + len(target) if position < 0 else position
            if not 0 <= at < len(target):
                raise TilebeamError(f"Position {position} is not in a text of {len(target)} tokens.")
            rows.setdefault(at, []).append(row)
        shape = (len(where), size if wanted is None else wanted.size)
        jobs.append(_Job(target, rows, Reading(np.empty(shape, np.float32))))
    keeping = engine.keeping
    try:
        engine.keep(True)  # for the texts of this call
        _run(engine, jobs, wanted, hook)
        engine.keep(keeping)
    except BaseException:
        engine.abort()
        engine.keeping = keeping
        raise
    return [job.out for job in jobs]


def _run(engine: Engine, jobs: list[_Job], wanted: npt.NDArray[np.int64] | None, hook: ReadHook | None) -> None:
    waiting = [job for job in jobs if job.rows]
    total = sum(len(job.target) for job in waiting)
    running: list[_Job] = []
    while waiting or running:
        waiting = [job for job in waiting if not _start(engine, job, running)]
        n = _fill(engine, running)
        if n == 0:
            raise TilebeamError("The KV cache has no room for this text; load the model with a larger n_ctx.")
        began = time.perf_counter()
        code = engine.context.decode(n)
        seconds = time.perf_counter() - began
        if code != 0:
            engine.fail(code)
        for job in running:
            job.out.seconds += seconds * job.done / n
            job.out.decoded_tokens += job.done
            for entry, position in job.flagged:
                logits = engine.context.logits(entry)
                job.out.logits[job.rows[position]] = logits if wanted is None else logits[wanted]
            if job.seq is not None and len(job.seq) > max(job.rows):
                engine.retire(job.seq)
                job.seq = None
        running = [job for job in running if job.seq is not None]
        if hook is not None:
            seen = sum(job.out.decoded_tokens + job.out.cached_tokens for job in jobs)
            hook(seen, total)


def _start(engine: Engine, job: _Job, running: list[_Job]) -> bool:
    """Give a text its sequence. False: not now."""
    limit = min(job.rows)  # from there on every token is needed for its logits, or follows one that is
    source, shared = engine.best_source(job.target, limit)
    for other in running:
        if min(limit, kv.common_prefix(other.target, job.target)) - shared >= _SHARE_AT_LEAST:
            return False
    ids = engine.kv.free_ids
    room = max(job.rows) + 1 - shared + sum(max(j.rows) + 1 - len(j.seq) for j in running if j.seq is not None)
    while (ids == 0 or engine.kv.free < room) and engine.evict(spare=source):
        ids = engine.kv.free_ids
    if ids == 0 or (running and engine.kv.free < room):
        return False
    job.seq = engine.fork(source, shared)
    job.out.cached_tokens = shared
    running.append(job)
    return True


def _fill(engine: Engine, running: list[_Job]) -> int:
    """Put the next tokens of the running texts into the batch; how many."""
    context = engine.context
    n = outputs = 0
    for job in running:
        job.done, job.flagged = 0, []
        assert job.seq is not None
        start, stop = len(job.seq), max(job.rows) + 1
        count = min(stop - start, context.n_batch - n, engine.kv.free)
        asked = [p for p in sorted(job.rows) if start <= p < start + count]
        if outputs + len(asked) > context.max_outputs:
            asked = asked[: context.max_outputs - outputs]
            count = asked[-1] + 1 - start if asked else 0
        if count <= 0:
            continue
        end = n + count
        context.token[n:end] = job.target[start : start + count]
        context.pos[n:end] = np.arange(start, start + count)
        context.seq[n:end] = job.seq.id
        context.output[n:end] = 0
        for position in asked:
            entry = n + position - start
            context.output[entry] = 1
            job.flagged.append((entry, position))
        engine.kv.extend(job.seq, job.target[start : start + count])
        job.done, outputs, n = count, outputs + len(asked), end
    return n
