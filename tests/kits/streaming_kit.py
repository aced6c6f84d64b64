"""Callers of one model in threads: run together, held back at a gate, waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tilebeam import LM, Delta, SamplingParams
from tilebeam.native.llama import Context

PROMPT = "the question is how many times the number"
LONG = SamplingParams(n=2, max_tokens=60, seed=5, ignore_eos=True)
DEADLINE = 120.0  # seconds, for a loaded machine


def idle(lm: LM) -> bool:
    engine = lm.engine
    return engine.kv.free == lm.n_ctx and not engine.kv.live and not engine.busy and not line(lm).taken


class Line(NamedTuple):
    """Who wants an engine: calls whose samples wait for the next step, calls in it, threads that wait for it; whether a
    thread has it, and a worker thread steps for calls that no thread waits for."""

    queued: int
    active: int
    readers: int
    taken: bool
    background: bool


def line(lm: LM) -> Line:
    one = lm._dispatcher
    return Line(len(one._queue), len(one._active), len(one._readers), one._owner is not None, one._worker is not None)


def tokens(lm: LM, prompt: str, params: SamplingParams) -> list[list[int]]:
    return [s.token_ids for s in lm.generate(prompt, params)[0].outputs]


class Together:
    """Runs functions in threads at once; their results or exceptions, in order."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self.results: list[Any] = [None] * len(functions)
        self._threads = [threading.Thread(target=self._run, args=(i, f)) for i, f in enumerate(functions)]
        for t in self._threads:
            t.start()

    def _run(self, i: int, function: Callable[[], Any]) -> None:
        try:
            self.results[i] = function()
        except BaseException as error:
            self.results[i] = error

    def wait(self) -> list[Any]:
        for t in self._threads:
            t.join(DEADLINE)
            assert not t.is_alive()
        return self.results


class Gate:
    """Lets a context decode only so many batches; whoever decodes more waits until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: int = 0) -> None:
        self.sizes: list[int] = []
        self.reached = threading.Event()
        self._open = threading.Event()
        real = Context.decode

        def decode(context: Context, n: int) -> int:
            if len(self.sizes) >= batches and not self._open.is_set():
                self.reached.set()
                assert self._open.wait(DEADLINE)
            self.sizes.append(n)
            return real(context, n)

        monkeypatch.setattr(Context, "decode", decode)

    def open(self) -> None:
        self._open.set()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def under_way(lm: LM) -> int:
    """Calls in the line and in the engine, and readers in the line."""
    now = line(lm)
    return now.queued + now.active + now.readers


def add_up(deltas: list[Delta], n: int) -> list[dict[str, Any]]:
    """What the deltas of each sample make up; the last one of each, and only that, says why it ended."""
    samples: list[dict[str, Any]] = [{"text": "", "ids": [], "logprobs": [], "top": [], "end": None} for _ in range(n)]
    for d in deltas:
        s = samples[d.index]
        assert s["end"] is None
        s["text"] += d.text
        s["ids"] += d.token_ids
        s["logprobs"] += d.logprobs or []
        s["top"] += d.top_logprobs or []
        s["end"] = d.finish_reason and (d.finish_reason, d.stop_reason)
    return samples
