"""`tilebeam bench`: llama-bench's flags, tables and field names; parallel sequences and several devices in one run."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilebeam._version import __version__
from tilebeam.cli import console
from tilebeam.errors import TilebeamError
from tilebeam.measure.machine import OtherLoad, busy_note, cpu_info
from tilebeam.measure.throughput import Case, compare, pairwise_ratio

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

FORMATS = ("md", "json", "jsonl", "csv")
# More than anybody means; keeps a slip like 1-1000000 from being expanded.
_LONGEST_LIST = 1000
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")


def numbers(text: str, flag: str) -> list[int]:
    """Parse llama-bench's lists: "1,2,4", "1-8", "1-8+2", "1-16*2", and mixtures.

    Raises:
        TilebeamError: anything else; names the flag.
    """
    values: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise TilebeamError(f"{flag} {text!r}: expected numbers and ranges such as 512, 1,2,4, 1-8+2 or 1-16*2.")
        first, last, op, step = match.groups()
        value, end, by = int(first), int(last or first), int(step or 1)
        if end < value or (op == "*" and (by < 2 or value == 0)) or by < 1:
            raise TilebeamError(f"{flag} {text!r}: the range {part.strip()} never ends or is empty.")
        while value <= end:
            values.append(value)
            value = value * by if op == "*" else value + by
            if len(values) > _LONGEST_LIST:
                raise TilebeamError(f"{flag} {text!r}: more than {_LONGEST_LIST} values.")
    return values


@dataclass(frozen=True)
class Row:
    """One measured line. Names are llama-bench's where it has the field.

    Attributes:
        model_size: bytes of all tensors; model_n_params: weights.
        device: "cpu" (llama.cpp's stock CPU backend) or "npu".
        executor: "thread" or "process"; None on the CPU.
        n_depth: tokens in the cache before the clock starts; depth_shared: one prompt for all sequences.
        samples_ns: nanoseconds of each run; samples_ts: its tokens per second, all sequences together.
        avg_ns, stddev_ns, avg_ts, stddev_ts: mean and sample standard deviation of these.
        ratio_vs_cpu: the median of the pairwise ratios to the CPU runs that stood next to them; above 1 is faster.
            None if the CPU was not measured. ratio_vs_cpu_min, ratio_vs_cpu_max: the spread of those ratios.
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
    max_seconds: float | None = None,
    on_run: Callable[[str, float | None], None] | None = None,
) -> list[Row]:
    """Time a case on several models, interleaved; one row per model, in their order. Arguments as for `compare`.

    The ratio column needs one of the models to be on the CPU.
    """
    from importlib import metadata

    started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    seconds = compare(models, case, repetitions, warmup=warmup, max_seconds=max_seconds, on_run=on_run)
    speeds = {name: [case.tokens / s for s in times] for name, times in seconds.items()}
    baseline = next((name for name, lm in models.items() if lm.device == "cpu"), None)
    rows = []
    for name, lm in models.items():
        ratio = pairwise_ratio(speeds[name], speeds[baseline]) if baseline is not None else None
        nanoseconds = [round(s * 1e9) for s in seconds[name]]
        rows.append(
            Row(
                tilebeam_version=__version__,
                llama_cpp_python=metadata.version("llama-cpp-python"),
                cpu_info=cpu_info(),
                model_filename=lm.info.path,
                model_type=lm.description,
                model_size=lm._model.n_bytes,
                model_n_params=lm._model.n_params,
                device=lm.device,
                executor=lm.info.executor,
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
                ratio_vs_cpu=ratio.median if ratio else None,
                ratio_vs_cpu_min=ratio.min if ratio else None,
                ratio_vs_cpu_max=ratio.max if ratio else None,
                samples_ns=nanoseconds,
                samples_ts=speeds[name],
            )
        )
    return rows


# --- output -----------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Prints rows as they come."""

    def row(self, row: Row) -> None: ...
    def close(self) -> None: ...


class MarkdownWriter:
    """llama-bench's table, with the number of sequences and the ratio to the CPU."""

    _COLUMNS = (
        ("model", -22),
        ("size", 10),
        ("params", 8),
        ("device", -6),
        ("threads", 7),
        ("npl", 3),
        ("test", -10),
        ("t/s", 16),
        ("vs cpu", 16),
    )

    def __init__(self) -> None:
        self._started = False

    def row(self, row: Row) -> None:
        if not self._started:
            self._started = True
            self._line([name for name, _ in self._COLUMNS])
            print("| " + " | ".join("-" * (abs(w) - (w > 0)) + (":" if w > 0 else "") for _, w in self._COLUMNS) + " |")
        ratio = "-"
        if row.ratio_vs_cpu is not None and row.ratio_vs_cpu_min is not None and row.ratio_vs_cpu_max is not None:
            ratio = f"{row.ratio_vs_cpu:.2f} ({row.ratio_vs_cpu_min:.2f}-{row.ratio_vs_cpu_max:.2f})"
        self._line(
            [
                row.model_type,
                size(row.model_size),
                count(row.model_n_params),
                row.device,
                str(row.n_threads),
                str(row.n_parallel),
                row.test,
                f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
                ratio if row.device != "cpu" else "1",
            ]
        )

    def _line(self, cells: list[str]) -> None:
        padded = (c.ljust(-w) if w < 0 else c.rjust(w) for c, (_, w) in zip(cells, self._COLUMNS, strict=True))
        print("| " + " | ".join(padded) + " |", flush=True)

    def close(self) -> None:
        if self._started:
            print(f"\ntilebeam {__version__}, {cpu_info()}; vs cpu: median (min-max) of the ratios of adjacent runs")


class JsonWriter:
    """One JSON array."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        self._rows.append(asdict(row))

    def close(self) -> None:
        print(json.dumps(self._rows, indent=2))


class JsonLinesWriter:
    """One JSON object per line, as soon as it is measured."""

    def row(self, row: Row) -> None:
        print(json.dumps(asdict(row)), flush=True)

    def close(self) -> None:
        pass


class CsvWriter:
    """Comma separated, all fields but the single runs, as llama-bench does."""

    _FIELDS = tuple(f.name for f in fields(Row) if not f.name.startswith("samples_"))

    def __init__(self) -> None:
        self._started = False

    def row(self, row: Row) -> None:
        if not self._started:
            self._started = True
            self._print(self._FIELDS)
        self._print([getattr(row, name) for name in self._FIELDS])

    def _print(self, values: Sequence[Any]) -> None:
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
        sys.stdout.write(line.getvalue())
        sys.stdout.flush()

    def close(self) -> None:
        pass


WRITERS: dict[str, Callable[[], Writer]] = {
    "md": MarkdownWriter,
    "json": JsonWriter,
    "jsonl": JsonLinesWriter,
    "csv": CsvWriter,
}


def size(n: int) -> str:
    """Bytes as llama-bench prints them."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def count(n: int) -> str:
    """Parameters as llama-bench prints them."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Everything to be measured, checked before anything is loaded.

    Attributes:
        models: files; each is measured on every device.
        devices: "cpu", "npu", in the order in which they take turns.
        batches: (n_batch, n_ubatch, n_threads); the models are loaded anew for each.
        cases: what to time with each.
        lora: adapters of all models, and their scales.
        cpu_model: the file for the CPU if the others are repacked ones.
    """

    models: list[Path]
    devices: list[str]
    batches: list[tuple[int, int, int]]
    cases: list[Case]
    repetitions: int
    warmup: bool
    executor: str | None = None
    n_devices: int | None = None
    memory_limit: list[str] | None = None
    lora: Sequence[tuple[str, float]] = ()
    cpu_model: Path | None = None

    @property
    def runs(self) -> int:
        """Runs to come, warmups included."""
        per_case = (self.repetitions + self.warmup) * len(self.devices)
        return len(self.models) * len(self.batches) * len(self.cases) * per_case

    def rows(self, on_run: Callable[[str, float | None], None], on_load: Callable[[str], None]) -> Iterator[Row]:
        """Measure; rows come as soon as a case is done."""
        from tilebeam.model.loader import load

        room = max(case.cells for case in self.cases)
        n_parallel = max(case.n_parallel for case in self.cases)
        for model, (n_batch, n_ubatch, threads) in product(self.models, self.batches):
            with ExitStack() as stack:
                loaded: dict[str, LM] = {}
                for device in self.devices:
                    path = self.cpu_model if device == "cpu" and self.cpu_model else model
                    on_load(f"loading {path.name} ({device})")
                    loaded[device] = stack.enter_context(
                        load(
                            path,
                            device=device,
                            n_ctx=room,
                            n_seq_max=n_parallel,
                            threads=threads,
                            n_batch=n_batch,
                            n_ubatch=min(n_ubatch, n_batch),
                            executor=self.executor,
                            devices=self.n_devices,
                            memory_limit=self.memory_limit,
                            lora=self.lora,
                        )
                    )
                for case in self.cases:
                    on_load(f"{case.name} x {case.n_parallel}")
                    yield from measure(loaded, case, self.repetitions, warmup=self.warmup, on_run=on_run)


def plan(
    models: Sequence[Path],
    *,
    n_prompt: str,
    n_gen: str,
    n_parallel: str,
    n_depth: str,
    batch: str,
    ubatch: str,
    threads: str | None,
    device: str,
    repetitions: int,
    warmup: bool,
    shared: bool,
    executor: str | None,
    n_devices: int | None,
    memory_limit: list[str] | None,
    lora: Sequence[tuple[str, float]],
    cpu_model: Path | None,
) -> Plan:
    """Turn the command's flags into a plan.

    Raises:
        TilebeamError: a flag makes no sense; a sentence that names it.
    """
    devices = [d.strip().lower() for d in device.split(",")]
    for name in devices:
        if name not in ("cpu", "npu"):
            raise TilebeamError(f"--device {device!r}: devices are cpu and npu, separated by commas.")
    if len(set(devices)) != len(devices):
        raise TilebeamError(f"--device {device!r} names a device twice.")
    for model in (*models, *([cpu_model] if cpu_model else [])):
        if not model.is_file():
            raise TilebeamError(f"{model} does not exist." if not model.exists() else f"{model} is not a file.")
    if repetitions < 1:
        raise TilebeamError(f"-r must be at least 1, not {repetitions}.")
    cases = []
    parallel, depths = numbers(n_parallel, "-npl"), numbers(n_depth, "-d")
    for sequences, depth in product(parallel, depths):
        cases += [Case(p, 0, sequences, depth, shared) for p in numbers(n_prompt, "-p") if p]
        cases += [Case(0, n, sequences, depth, shared) for n in numbers(n_gen, "-n") if n]
    if not cases:
        raise TilebeamError("There is nothing to measure: -p and -n are both 0.")
    for case in cases:
        case.validate()
    usable = str(len(os.sched_getaffinity(0)))
    batches = list(product(numbers(batch, "-b"), numbers(ubatch, "-ub"), numbers(threads or usable, "-t")))
    most = max(case.n_parallel for case in cases)
    for n_batch, _, _ in batches:
        if n_batch < most:
            raise TilebeamError(f"-b {n_batch} is less than the {most} sequences of -npl; every batch must hold them.")
    return Plan(
        list(models), devices, batches, cases, repetitions, warmup, executor, n_devices, memory_limit, lora, cpu_model
    )


def run(what: Plan, output: str) -> None:
    """Measure and print, with a progress bar on stderr."""
    writer = WRITERS[output]()
    executors = set()
    with OtherLoad() as others, console.bar("bench") as progress:
        task = progress.add_task("", total=what.runs, note="")

        def on_run(device: str, seconds: float | None) -> None:
            note = f"{device} warm" if seconds is None else f"{device} {seconds:.2f} s"
            progress.update(task, advance=1, note=note)

        for row in what.rows(on_run, lambda text: progress.update(task, description=text)):
            writer.row(row)
            executors.add(row.executor)
    writer.close()
    # A tilebeam-npud of ours would count as another program.
    if "process" not in executors and (note := busy_note(others.share)):
        console.err().print(note, style="yellow")
