"""Throughput as rows: cases timed on several models, interleaved, under llama-bench's field names."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from tilebeam._version import __version__
from tilebeam.measure.machine import cpu_info
from tilebeam.measure.throughput import Case, compare
from tilebeam.model.lm import LM


@dataclass(frozen=True)
class Row:
    """One measured line. Names are llama-bench's where it has the field.

    Attributes:
        model_size: bytes of all tensors; model_n_params: weights.
        device: "cpu" (llama.cpp's stock CPU backend), "npu", or "npu-deterministic".
        executor: "thread" or "process"; None on the CPU.
        device_share: the part of the weight matrices' bytes that the NPU multiplies by, 0 to 1; 0 on the CPU.
        n_depth: tokens in the cache before the clock starts; depth_shared: one prompt for all sequences.
        samples_ns: nanoseconds of each run; samples_ts: its tokens per second, all sequences together.
        avg_ns, stddev_ns, avg_ts, stddev_ts: mean and sample standard deviation of these.
        ratio_vs_cpu: the median of the pairwise ratios to the CPU runs that stood next to them; above 1 is faster.
            None if the CPU was not measured. ratio_vs_cpu_min, ratio_vs_cpu_max: the spread of those ratios.
        cpu_seconds_per_token: CPU time of all CPUs together, mean over the runs.
    """

    tilebeam_version: str
    llama_cpp_python: str
    cpu_info: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    device: str
    executor: str | None
    device_share: float
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_parallel: int
    n_prompt: int
    n_gen: int
    n_depth: int
    depth_shared: bool
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    ratio_vs_cpu: float | None
    ratio_vs_cpu_min: float | None
    ratio_vs_cpu_max: float | None
    cpu_seconds_per_token: float
    samples_ns: list[int]
    samples_ts: list[float]

    @property
    def test(self) -> str:
        """The case's name, e.g. "tg128"."""
        return Case(self.n_prompt, self.n_gen, self.n_parallel, self.n_depth, self.depth_shared).name


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(
    models: dict[str, LM],
    case: Case,
    repetitions: int,
    *,
    warmup: bool = True,
    on_run: Callable[[str, float | None], None] | None = None,
) -> list[Row]:
    """Time a case on several models, interleaved; one row per model, in their order. Arguments as for `compare`.

    The ratio column needs one of the models to be on the CPU.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    costs = compare(models, case, repetitions, warmup=warmup, on_run=on_run)
    speeds = {name: [case.tokens / c.seconds for c in own] for name, own in costs.items()}
    baseline = next((name for name, lm in models.items() if lm.device == "cpu"), None)
    rows = []
    for name, lm in models.items():
        # the i-th runs of all models stood next to each other
        ratios = [a / b for a, b in zip(speeds[name], speeds[baseline], strict=True)] if baseline is not None else None
        nanoseconds = [round(c.seconds * 1e9) for c in costs[name]]
        rows.append(
            Row(
                tilebeam_version=__version__,
                llama_cpp_python=metadata.version("llama-cpp-python"),
                cpu_info=cpu_info(),
                model_filename=lm.info.path,
                model_type=lm.description,
                model_size=lm._model.n_bytes,
                model_n_params=lm._model.n_params,
                device=f"{lm.device}-deterministic" if lm.info.deterministic else lm.device,
                executor=lm.info.executor,
                device_share=lm.info.device_share,
                n_batch=lm.info.n_batch,
                n_ubatch=lm.info.n_ubatch,
                n_threads=lm.info.threads,
                n_parallel=case.n_parallel,
                n_prompt=case.n_prompt,
                n_gen=case.n_gen,
                n_depth=case.n_depth,
                depth_shared=case.shared,
                test_time=started,
                avg_ns=round(statistics.fmean(nanoseconds)),
                stddev_ns=round(_deviation(nanoseconds)),
                avg_ts=statistics.fmean(speeds[name]),
                stddev_ts=_deviation(speeds[name]),
                ratio_vs_cpu=statistics.median(ratios) if ratios else None,
                ratio_vs_cpu_min=min(ratios) if ratios else None,
                ratio_vs_cpu_max=max(ratios) if ratios else None,
                cpu_seconds_per_token=statistics.fmean(c.cpu_seconds for c in costs[name]) / case.tokens,
                samples_ns=nanoseconds,
                samples_ts=speeds[name],
            )
        )
    return rows
