"""Coroutines share batches with each other and with threads, leave the event loop free, and lose no KV cell."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from streaming_kit import DEADLINE, LONG, PROMPT, Gate, add_up, idle, line, tokens, under_way, until
from tilebeam import LM, Progress, SamplingParams


def test_tasks_share_batches(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(n=2, max_tokens=20, seed=s, ignore_eos=True) for s in range(6)]
    expected = [tokens(lm, PROMPT, p) for p in params]
    gate = Gate(monkeypatch)

    async def stream(p: SamplingParams) -> list[list[int]]:
        async with lm.astream(PROMPT, p) as s:
            return [x["ids"] for x in add_up([d async for d in s], p.n)]

    async def call(p: SamplingParams) -> list[list[int]]:
        heard: list[Progress] = []
        [result] = await lm.agenerate(PROMPT, p, progress=heard.append)
        assert heard[-1].finished == heard[-1].total == 2
        return [s.token_ids for s in result.outputs]

    async def main() -> list[list[list[int]]]:
        tasks = [asyncio.create_task((stream if i % 2 else call)(p)) for i, p in enumerate(params)]
        while under_way(lm) < len(params):
            await asyncio.sleep(0.001)
        gate.open()
        return await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE)

    assert asyncio.run(main()) == expected
    assert len(gate.sizes) < 3 * 20
    until(lambda: not line(lm).background)
    assert idle(lm)
    assert asyncio.run(lm.agenerate([])) == []


def test_cancelled_tasks_free_their_cells(lm: LM) -> None:
    forever = SamplingParams(n=3, max_tokens=None, ignore_eos=True, seed=1)
    expected = tokens(lm, PROMPT, LONG)

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> list[list[int]]:
        tasks = [
            asyncio.create_task(lm.agenerate(PROMPT, forever)),
            asyncio.create_task(read(lm.astream("so", forever))),
        ]
        kept = asyncio.create_task(lm.agenerate(PROMPT, LONG))
        async with lm.astream("a", forever) as stream:
            drawn = 0
            async for d in stream:
                drawn += len(d.token_ids)
                if drawn > 20:
                    break
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        [result] = await asyncio.wait_for(kept, DEADLINE)
        return [s.token_ids for s in result.outputs]

    assert asyncio.run(main()) == expected
    until(lambda: idle(lm))


def test_streams_that_nobody_reads_any_more_end(lm: LM) -> None:
    """A task that forgets its stream, and an event loop that ends before its calls do."""
    forever = SamplingParams(n=2, max_tokens=None, ignore_eos=True, seed=1)

    async def forgets() -> None:
        stream = lm.astream(PROMPT, forever)
        await anext(stream)
        del stream
        gc.collect()

    asyncio.run(forgets())
    until(lambda: idle(lm))

    async def leaves() -> None:
        task = asyncio.create_task(lm.agenerate(PROMPT, forever))
        while not lm.engine.busy:
            await asyncio.sleep(0.001)
        assert not task.done()

    asyncio.run(leaves())  # asyncio.run cancels what is left
    until(lambda: idle(lm))
