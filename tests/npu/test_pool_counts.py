"""Barriers of the thread pool when their counts overflow."""

from __future__ import annotations

from pathlib import Path

import native_kit


def test_nobody_leaves_a_barrier_before_the_others_arrive(tmp_path: Path) -> None:
    """After 2^30 barriers of one kind, too: counts of the other kind have stood still meanwhile."""
    program = native_kit.build(
        "pool_counts.cpp", ["npu/thread_pool.cpp", "base/cpus.cpp", "base/control_groups.cpp"], tmp_path
    )
    done = native_kit.run(program)
    assert (done.returncode, done.stdout) == (0, "0\n")
