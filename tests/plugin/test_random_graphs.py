"""Random graphs through ggml's allocator give the stock CPU backend's results on the device, whatever lies where.

TILEBEAM_GRAPH_SECONDS=N looks at new graphs for that long.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ggml_kit as kit
import graph_kit
import pytest
import random_graphs
from ggml_kit import ffi

PART, PARTS = 50, 12
THREADS = (1, 2, 3)
Backends = tuple[tuple[Any, Any], tuple[Any, Any]]


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    """The device and the stock CPU backend, each with its buffer type."""
    device = kit.device()
    own = kit.lib.ggml_backend_dev_init(device.pointer, ffi.NULL)
    stock = graph_kit.cpu_backend()
    yield (own, device.plain), (stock, kit.lib.ggml_backend_cpu_buffer_type())
    for backend in (own, stock):
        kit.lib.ggml_backend_free(backend)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs(backends: Backends, part: int) -> None:
    graph_kit.set_threads(backends[0][0], THREADS[part % len(THREADS)])
    assert random_graphs.differences(range(part * PART, (part + 1) * PART), *backends) == []


@pytest.mark.skipif("TILEBEAM_GRAPH_SECONDS" not in os.environ, reason="TILEBEAM_GRAPH_SECONDS is not set")
@pytest.mark.timeout(0)
def test_new_random_graphs(backends: Backends) -> None:
    seed = time.time_ns() >> 20
    end = time.monotonic() + float(os.environ["TILEBEAM_GRAPH_SECONDS"])
    while time.monotonic() < end:
        graph_kit.set_threads(backends[0][0], THREADS[seed // PART % len(THREADS)])
        assert random_graphs.differences(range(seed, seed + PART), *backends) == []
        seed += PART


def test_every_op_is_in_many_graphs() -> None:
    seen = Counter()
    for seed in range(PART * PARTS):
        graph = random_graphs.RandomGraph(seed)
        seen.update(set(graph.ops))
        graph.close()
    assert set(seen) == set(random_graphs.OPS)
    assert min(seen.values()) > PART * PARTS // 10, seen
