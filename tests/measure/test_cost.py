"""Cost of work: wall time and CPU time."""

from __future__ import annotations

import time

import pytest
from tilebeam.measure.cost import Stopwatch

pytestmark = pytest.mark.quick


def test_stopwatch() -> None:
    watch = Stopwatch()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    cost = watch.cost()
    assert cost.cpu_seconds >= 0.05
    assert cost.seconds >= 0.05
