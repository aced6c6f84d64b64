"""Settings of all tests: hypothesis does not judge how fast a machine is, which other programs may keep busy; and which
tests are quick (`make test-quick`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("tilebeam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tilebeam")

# No test may fill the packed files of who runs it.
os.environ.pop("TILEBEAM_PACKED_CACHE", None)

# Rooms and files marked "quick", but for what runs in an emulator: they load no model, and all of them together take
# less than two minutes on two cores.
QUICK = (
    "answers",
    "bench/test_real.py",
    "bench/test_rounds.py",
    "bench/test_run_all.py",
    "bench/test_verdicts.py",
    "cli/test_help.py",
    "engine/test_detokenizer.py",
    "engine/test_kv_cache.py",
    "engine/test_native_sampling.py",
    "evaluation/test_eval_statistics.py",
    "evaluation/test_eval_tasks.py",
    "evaluation/test_benchmarks.py",
    "evaluation/test_evaluation.py",
    "ext",
    "gguf/test_gguf_file.py",
    "npu/test_family_ops.py",
    "npu/test_gemm.py",
    "npu/test_sampling_ops.py",
    "npu/test_vector_ops.py",
    "pages/test_search_page.py",
    "project/test_documents.py",
    "project/test_layers.py",
    "project/test_rooms.py",
    "sandbox",
    "search/test_algorithms.py",
    "search/test_methods.py",
    "session/test_session.py",
)
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(_HERE / name) for name in QUICK) and "qemu-" not in item.name:
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def _quick_tests_load_no_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("quick"):
        import llama_cpp.llama_cpp as C

        def refuse(*_: Any) -> None:
            raise AssertionError("this test is marked quick (tests/conftest.py), but it loads a model")

        monkeypatch.setattr(C, "llama_model_load_from_file", refuse)
