"""Workers on CPUs of different speeds, such as efficiency cores: they end a product at about the same time, and each
part of it is computed once."""

from __future__ import annotations

from pathlib import Path

import native_kit
import pytest

FAST_AND_SLOW = (1.0, 1.0, 0.5, 0.5)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times are those of a clock of its own: what it prints does not depend on this machine."""
    npu = ["ops/mul_mat.cpp", "ops/mul_mat_plan.cpp", "context.cpp", "thread_pool.cpp"]
    beside = [*(f"npu/{name}" for name in npu), "base/cpus.cpp", "base/control_groups.cpp"]
    return native_kit.build("slow_workers.cpp", beside, tmp_path_factory.mktemp("native"), contract=True)


def run(program: Path, rows: int, panels: int, speeds: tuple[float, ...]) -> tuple[float, float]:
    """(the share of the time for which the first to end had nothing to do, how much longer than at best it took)."""
    done = native_kit.run(program, str(rows), str(panels), *map(str, speeds))
    assert done.returncode == 0, done.stderr
    idle, longer, wrong = done.stdout.split()
    assert wrong == "0"
    return float(idle), float(longer)


@pytest.mark.parametrize(
    "speeds", [(1.0,) * 4, FAST_AND_SLOW, (1.0, 1.0, 1.0, 0.3), (1.0, 0.25), (1.0,) * 4 + (0.4,) * 4], ids=str
)
@pytest.mark.parametrize("panels", [152, 4748], ids=["feed-forward", "output"])
def test_items_shrink_so_that_all_end_together(program: Path, panels: int, speeds: tuple[float, ...]) -> None:
    """Of decode steps, whose rows are one group."""
    idle, longer = run(program, 1, panels, speeds)
    assert idle < 0.03
    assert longer < 0.02


@pytest.mark.parametrize("rows", [64, 512])
def test_items_of_prompts(program: Path, rows: int) -> None:
    """They are of one size: nobody waits longer than for one of them."""
    idle, longer = run(program, rows, 152, FAST_AND_SLOW)
    assert idle < 0.2
    assert longer < 0.1
