"""Cost of work: CPU time, and energy from counters that a folder stands in for."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebeam.measure import energy
from tilebeam.measure.cost import Stopwatch

pytestmark = pytest.mark.quick


def zone(sys: Path, number: str, name: str, joules: float, most: float = 1000.0) -> Path:
    folder = sys / "class/powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text(f"{round(most * 1e6)}\n")
    return folder


def battery(sys: Path, name: str, status: str = "Discharging", **files: int) -> None:
    folder = sys / "class/power_supply" / name
    folder.mkdir(parents=True)
    (folder / "type").write_text("Battery\n")
    (folder / "status").write_text(status + "\n")
    for file, value in files.items():
        (folder / file).write_text(f"{value}\n")


def test_packages_and_memory_are_added(tmp_path: Path) -> None:
    for number, name, joules in (
        ("0", "package-0", 10.0),
        ("0:0", "core", 5.0),  # a part of its package
        ("0:1", "dram", 2.0),
        ("1", "package-1", 20.0),
        ("2", "psys", 50.0),  # has the packages in it
    ):
        zone(tmp_path, number, name, joules)
    source = energy.found(tmp_path)
    assert source is not None
    assert source.name == "RAPL"
    first = source.read()
    zone(tmp_path, "0", "package-0", 13.0)
    zone(tmp_path, "0:0", "core", 7.0)
    zone(tmp_path, "0:1", "dram", 2.5)
    zone(tmp_path, "1", "package-1", 20.25)
    zone(tmp_path, "2", "psys", 90.0)
    assert source.joules(first, source.read()) == pytest.approx(3.75)


@given(start=st.floats(0, 999), spent=st.floats(0, 999))
def test_a_counter_that_begins_anew(tmp_path_factory: pytest.TempPathFactory, start: float, spent: float) -> None:
    sys = tmp_path_factory.mktemp("sys")
    zone(sys, "0", "package-0", start)
    source = energy.Rapl(sys)
    first = source.read()
    zone(sys, "0", "package-0", (start + spent) % 1000.0)
    assert source.joules(first, source.read()) == pytest.approx(spent, abs=1e-5)


def test_batteries_that_discharge(tmp_path: Path) -> None:
    battery(tmp_path, "BAT0", power_now=7_000_000)
    battery(tmp_path, "BAT1", current_now=-500_000, voltage_now=12_000_000)  # some drivers tell it with a sign
    mouse = tmp_path / "class/power_supply/mouse"
    battery(tmp_path, "mouse", status="Unknown")
    (mouse / "scope").write_text("Device\n")
    source = energy.found(tmp_path)
    assert source is not None
    assert source.name == "battery"
    first, last = (replace(source.read(), seconds=at) for at in (5.0, 15.0))
    assert source.joules(first, last) == pytest.approx(130.0)


def test_machines_that_tell_nothing(tmp_path: Path) -> None:
    assert energy.found(tmp_path) is None
    battery(tmp_path, "BAT0", status="Charging", power_now=7_000_000)
    assert energy.found(tmp_path) is None  # what goes into it is not what the machine draws
    (zone(tmp_path, "0", "package-0", 1.0) / "energy_uj").write_text("<not a number>")
    assert energy.found(tmp_path) is None


class Counter:
    """10 W by the clock of its readings."""

    name = "test"

    def __init__(self) -> None:
        self.told = [1.0, 6.0]

    def read(self) -> energy.EnergyReading:
        if not self.told:
            raise ValueError("plugged in")
        return energy.EnergyReading((self.told.pop(0),))

    def joules(self, first: energy.EnergyReading, last: energy.EnergyReading) -> float:
        return last.joules[0] - first.joules[0]


def test_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "source", Counter)
    watch = Stopwatch()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    cost = watch.cost()
    assert cost.joules == 5.0
    assert cost.cpu_seconds >= 0.05
    assert cost.seconds >= 0.05
    assert watch.cost().joules is None  # the source is gone

    monkeypatch.setattr(energy, "source", lambda: None)
    assert Stopwatch().cost().joules is None
