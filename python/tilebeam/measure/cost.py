"""What a piece of work costs: seconds, CPU-seconds, and joules where the machine tells them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tilebeam.measure import energy
from tilebeam.measure.machine import cpu_seconds


@dataclass(frozen=True)
class Cost:
    """Of one piece of work.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of this process and its children, on all CPUs together.
        joules: of the whole machine, other programs included; None if it does not tell.
    """

    seconds: float
    cpu_seconds: float
    joules: float | None


class Stopwatch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._source = energy.source()
        self._energy = self._reading()
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()

    def _reading(self) -> energy.EnergyReading | None:
        try:
            return self._source.read() if self._source is not None else None
        except (OSError, ValueError):  # the machine was plugged in
            return None

    def cost(self) -> Cost:
        """Return the cost until now."""
        seconds = time.perf_counter() - self._began
        cpu = cpu_seconds() - self._cpu
        first, last = self._energy, self._reading()
        if self._source is None or first is None or last is None:
            return Cost(seconds, cpu, None)
        return Cost(seconds, cpu, self._source.joules(first, last))
