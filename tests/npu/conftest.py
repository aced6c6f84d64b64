"""Tests of ops on Hexagon, the kernel sets "qemu-.." of npu_ops.py: examples take some hundred times as long there."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import hexagon_kit
import npu_ops
import pytest
from hypothesis import settings

EXAMPLES = 6  # of each property; of attention, which takes longest, 2
_SETTINGS = "_hypothesis_internal_use_settings"  # @settings has no other way to be changed from outside


def kernel_set(item: pytest.Item) -> str | None:
    """The emulated kernel set that a test runs on, if it is one."""
    isa = item.callspec.params.get("isa") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return isa if isa in npu_ops.HEXAGON else None


def rows_of(item: pytest.Function) -> Iterator[tuple[int, int]]:
    """For each list of parameters but kernel sets and threads: which of its entries this case has, of how many."""
    for mark in item.iter_markers("parametrize"):
        names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        if "isa" not in names and "n_threads" not in names:
            entries = [getattr(v, "values", v if len(names) > 1 else (v,)) for v in mark.args[1]]
            own = [item.callspec.params[n] for n in names]
            yield next(i for i, e in enumerate(entries) if all(map(operator.is_, e, own))), len(entries)


def wanted(item: pytest.Function) -> bool:
    """Whether a case runs on its emulated set: of a test's cases those on most threads in which each entry of each list
    of parameters occurs, not every combination. The i-th has the i-th entry of every list, of shorter ones from their
    beginning again. The portable set runs the first only.
    """
    rows = list(rows_of(item))
    cases = range(1 if kernel_set(item) == "qemu-portable" else max((n for _, n in rows), default=1))
    most = item.callspec.params.get("n_threads", npu_ops.THREADS[-1]) == npu_ops.THREADS[-1]
    return most and any(all(at == i % n for at, n in rows) for i in cases)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [i for i in items if isinstance(i, pytest.Function) and kernel_set(i) and not wanted(i)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in left_out]


@pytest.fixture(autouse=True)
def _fewer_examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_set(request.node) and hasattr(request.function, _SETTINGS):
        most = 2 if request.path.name == "test_attention.py" else EXAMPLES
        monkeypatch.setattr(
            request.function, _SETTINGS, settings(getattr(request.function, _SETTINGS), max_examples=most)
        )


@pytest.fixture(scope="module", autouse=True)
def _stopped() -> Iterator[None]:
    yield
    hexagon_kit.stop_remote()
