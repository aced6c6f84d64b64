"""The energy that a machine's own counters tell: RAPL of x86 processors, or else the battery."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

SYS = Path("/sys")


@dataclass(frozen=True)
class EnergyReading:
    """What a source said at one moment.

    Attributes:
        joules: of each counter, which begin anew at some value.
        watts: drawn at this moment, where the source tells power and no energy.
        seconds: when that was, by `time.perf_counter`.
    """

    joules: tuple[float, ...] = ()
    watts: float = 0.0
    seconds: float = field(default_factory=time.perf_counter)


class Source(Protocol):
    """Something that tells energy.

    Attributes:
        name: what it is, for reports.
    """

    name: str

    def read(self) -> EnergyReading:
        """Read the state of now.

        Raises:
            OSError: it cannot be read.
            ValueError: it says something else than a number.
        """
        ...

    def joules(self, first: EnergyReading, last: EnergyReading) -> float:
        """Return energy between two readings."""
        ...


class Rapl:
    """Running average power limit: a counter for each processor package, and for memory where it is told apart (Linux'
    documentation, power/powercap). Since 2020, root alone may read them on most systems."""

    name = "RAPL"

    def __init__(self, sys: Path = SYS) -> None:
        zones = sorted((sys / "class/powercap").glob("*-rapl:*"))
        names = {zone: (zone / "name").read_text(encoding="ascii").strip() for zone in zones}
        self._zones = [zone for zone, name in names.items() if name.startswith("package") or name == "dram"]
        self._ranges = [_number(zone / "max_energy_range_uj") / 1e6 for zone in self._zones]

    def read(self) -> EnergyReading:
        """Read the counters."""
        return EnergyReading(tuple(_number(zone / "energy_uj") / 1e6 for zone in self._zones))

    def joules(self, first: EnergyReading, last: EnergyReading) -> float:
        """Return their difference; a counter that is less than before has begun anew once."""
        pairs = zip(first.joules, last.joules, self._ranges, strict=True)
        return sum(after - before + (most if after < before else 0.0) for before, after, most in pairs)


class Battery:
    """What batteries of a machine that is not plugged in give: mean of their power at both ends, times the seconds.

    Their counters of energy move once in many seconds, too seldom for what is measured here.
    """

    name = "battery"

    def __init__(self, sys: Path = SYS) -> None:
        supplies = sorted((sys / "class/power_supply").glob("*"))
        self._batteries = [s for s in supplies if _word(s / "type") == "Battery" and _word(s / "scope") != "Device"]

    def read(self) -> EnergyReading:
        """Read the power of now, of all batteries."""
        return EnergyReading(watts=sum(map(self._watts, self._batteries)))

    def joules(self, first: EnergyReading, last: EnergyReading) -> float:
        """Estimate it from the power at both ends."""
        return (first.watts + last.watts) / 2 * (last.seconds - first.seconds)

    @staticmethod
    def _watts(battery: Path) -> float:
        if (status := _word(battery / "status")) != "Discharging":
            raise ValueError(f"{battery.name} is {status.lower() or 'in an unknown state'}")
        if (battery / "power_now").exists():
            return abs(_number(battery / "power_now")) / 1e6
        return abs(_number(battery / "current_now")) * _number(battery / "voltage_now") / 1e12


@cache
def source() -> Source | None:
    """Return what tells this machine's energy; None if nothing does that this process may read."""
    return found(SYS)


def found(sys: Path) -> Source | None:
    """Find the first source below a mounted sysfs that can be read and has something to tell."""
    for kind in (Rapl, Battery):
        try:
            one: Source = kind(sys)
            reading = one.read()
        except (OSError, ValueError):
            continue
        if reading.joules or reading.watts:
            return one
    return None


def _number(path: Path) -> float:
    return float(path.read_text(encoding="ascii"))


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
