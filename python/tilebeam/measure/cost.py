"""What a piece of work costs: seconds and CPU-seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tilebeam.measure.machine import cpu_seconds


@dataclass(frozen=True)
class Cost:
    """Of one piece of work.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of this process and its children, on all CPUs together.
    """

    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()

    def cost(self) -> Cost:
        """Return the cost until now."""
        return Cost(time.perf_counter() - self._began, cpu_seconds() - self._cpu)
