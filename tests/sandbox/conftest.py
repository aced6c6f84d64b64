"""No program and no judge outlives its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tilebeam.sandbox import child


def children() -> list[str]:
    """The processes that both zygotes have."""
    running = [z.process.pid for z in (child._PLAIN, child._WITH_LIBRARIES) if z.process is not None]
    return [n for pid in running for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    assert children() == []
