"""What benches read off the traces of graphs (tilebeam.measure.trace)."""

from __future__ import annotations

import numpy as np
from tilebeam.measure.trace import Records, spans_of


def graphs_of(records: Records) -> list[Records]:
    """The ops of each graph, a record for each worker's part."""
    ops = spans_of(records, "OP")
    ops = ops[np.argsort(ops["seq"], kind="stable")]
    return np.split(ops, np.flatnonzero(np.diff(ops["seq"])) + 1)


def work_of(ops: Records) -> tuple[int, float, float]:
    """Of one graph's ops: how many phases; seconds of each phase's busiest worker, summed; all workers' seconds."""
    phases, phase = np.unique(ops["phase"], return_inverse=True)
    lanes, lane = np.unique(ops["lane"], return_inverse=True)
    work = np.zeros((len(phases), len(lanes)))
    np.add.at(work, (phase, lane), (ops["end_ns"] - ops["begin_ns"]) / 1e9)
    return len(phases), float(work.max(axis=1).sum()), float(work.sum())
