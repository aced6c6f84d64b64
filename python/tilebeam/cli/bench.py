"""`tilebeam bench`: llama-bench's flags, tables and field names; parallel sequences and several devices in one run."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilebeam.cli import console
from tilebeam.cli.options import Devices, ExecutorOption, LoraOptions, MemoryLimit, check_npu_only, grouped, option
from tilebeam.errors import TilebeamError
from tilebeam.model.hub import missing
from tilebeam.model.load_options import Backend, backends, default_threads

if TYPE_CHECKING:
    from tilebeam.measure.throughput import Case
    from tilebeam.model.lm import LM

Format = Literal["md", "json", "jsonl", "csv"]
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


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured; names and lists are llama-bench's."""

    model: Annotated[
        list[Path], typer.Option("-m", "--model", help="GGUF file; repeat for several.", show_default=False)
    ]
    n_prompt: str = option("512", "-p", "--n-prompt", help="Prompt tokens per sequence; 0: no such test.")
    n_gen: str = option("128", "-n", "--n-gen", help="Generated tokens per sequence; 0: no such test.")
    n_parallel: str = option("1", "-npl", "--n-parallel", help="Parallel sequences.")
    n_depth: str = option("0", "-d", "--n-depth", help="Tokens per sequence already in the cache.")
    shared: bool = option(
        False, "-pps", "--prompt-shared", help="The -d tokens are one prompt that all sequences share."
    )
    batch: str = option("2048", "-b", "--batch-size", help="Most tokens per llama_decode.")
    ubatch: str = option("512", "-ub", "--ubatch-size", help="Most tokens per graph.")
    threads: str | None = option(None, "-t", "--threads", help="Threads; default: all usable cores.")
    repetitions: int = option(5, "-r", "--repetitions", help="Timed runs of each test.")
    output: Format = option("md", "-o", "--output", help="Format on stdout.")
    device: str = option("cpu,tilebeam", "--device", "-dev", help="Devices, comma separated; their runs alternate.")
    no_warmup: bool = option(False, "--no-warmup", help="No untimed run before the timed ones.")
    executor: ExecutorOption = None
    devices: Devices = None
    memory_limit: MemoryLimit = None
    deterministic: bool = option(
        False, "--deterministic", help="Tilebeam also in its deterministic mode, in turns with the others."
    )
    lora: LoraOptions
    cpu_model: Path | None = option(None, help="Ordinary file for the CPU if -m is a repacked one.")


@grouped
def bench(options: BenchOptions) -> None:
    """Measure throughput as llama-bench does, with parallel sequences, devices interleaved (A B A B).

    Numbers may be lists and ranges as for llama-bench: 1,2,4 or 1-8+2 or 1-16*2. Every prompt length (-p) and every
    generation length (-n) is a test of its own. Tokens are random, nothing is sampled. "vs cpu" is the median of the
    ratios of adjacent runs, with the least and the greatest; "CPU ms/t" is the time of all CPUs together per token.

    Example: tilebeam bench -m model.gguf -p 512 -n 64 -npl 1,8,16 -r 5
    """
    from tilebeam.cli.bench_formats import Writer
    from tilebeam.measure.benchmark import measure
    from tilebeam.measure.machine import OtherLoad, busy_note
    from tilebeam.model.loader import load

    o = options
    turns, batches, cases = _planned(o)
    per_case = (o.repetitions + (not o.no_warmup)) * len(turns)
    writer, executors = Writer(o.output), set()
    with OtherLoad() as others, console.bar("bench", every_part=True) as progress:
        task = progress.add_task("", total=len(o.model) * len(batches) * len(cases) * per_case, note="")

        def on_run(device: str, seconds: float | None) -> None:
            note = f"{device} warm" if seconds is None else f"{device} {seconds:.2f} s"
            progress.update(task, advance=1, note=note)

        for model, (n_batch, n_ubatch, threads) in product(o.model, batches):
            with ExitStack() as stack:
                loaded: dict[str, LM] = {}
                for name, device, deterministic in turns:
                    path = o.cpu_model if device == "cpu" and o.cpu_model else model
                    progress.update(task, description=f"loading {path.name} ({name})")
                    lm = load(
                        path,
                        device=device,
                        n_ctx=max(case.cells for case in cases),
                        n_seq_max=max(case.n_parallel for case in cases),
                        threads=threads,
                        n_batch=n_batch,
                        n_ubatch=min(n_ubatch, n_batch),
                        executor=o.executor,
                        devices=o.devices,
                        memory_limit=o.memory_limit.split(",") if o.memory_limit else None,
                        lora=o.lora.adapters(),
                        deterministic=deterministic,
                    )
                    loaded[name] = stack.enter_context(lm)
                for case in cases:
                    progress.update(task, description=f"{case.name} x {case.n_parallel}")
                    for row in measure(loaded, case, o.repetitions, warmup=not o.no_warmup, on_run=on_run):
                        writer.row(row)
                        executors.add(row.executor)
    writer.close()
    # A tilebeam-npud of ours would count as another program.
    if "process" not in executors and (note := busy_note(others.share)):
        console.err().print(note, style="yellow")


def _planned(o: BenchOptions) -> tuple[list[tuple[str, Backend, bool]], list[tuple[int, int, int]], list[Case]]:
    """Turn the command's flags into what is to be measured, before anything is loaded.

    Returns:
        What takes turns: how it is called, where it runs, whether in the deterministic mode; (n_batch, n_ubatch,
        n_threads), for each of which the models are loaded anew; and what to time with each.

    Raises:
        TilebeamError: one of them makes no sense, and is named.
    """
    from tilebeam.measure.throughput import Case

    devices = backends(o.device)
    if len(set(devices)) != len(devices):
        raise TilebeamError(f"--device {o.device!r} names a device twice.")
    if not devices:
        raise TilebeamError(f"--device {o.device!r} names no device.")
    npu_only = {"--executor": o.executor, "--devices": o.devices, "--memory-limit": o.memory_limit}
    check_npu_only(npu_only, "npu" in devices or o.deterministic)
    if o.cpu_model is not None and "cpu" not in devices:
        raise TilebeamError(f"--cpu-model: --device {o.device} leaves the CPU aside.")
    for model in (*o.model, *([o.cpu_model] if o.cpu_model else [])):
        if not model.is_file():
            raise TilebeamError(missing(model) if not model.exists() else f"{model} is not a file.")
    if o.repetitions < 1:
        raise TilebeamError(f"-r must be at least 1, not {o.repetitions}.")
    cases = []
    for sequences, depth in product(numbers(o.n_parallel, "-npl"), numbers(o.n_depth, "-d")):
        cases += [Case(p, 0, sequences, depth, o.shared) for p in numbers(o.n_prompt, "-p") if p]
        cases += [Case(0, n, sequences, depth, o.shared) for n in numbers(o.n_gen, "-n") if n]
    if not cases:
        raise TilebeamError("There is nothing to measure: -p and -n are both 0.")
    for case in cases:
        case.validate()
    threads = numbers(o.threads or str(default_threads()), "-t")
    batches = list(product(numbers(o.batch, "-b"), numbers(o.ubatch, "-ub"), threads))
    most = max(case.n_parallel for case in cases)
    for n_batch, _, _ in batches:
        if n_batch < most:
            raise TilebeamError(f"-b {n_batch} is less than the {most} sequences of -npl; every batch must hold them.")
    turns: list[tuple[str, Backend, bool]] = [(str(device), device, False) for device in devices]
    if o.deterministic:
        turns.append(("npu-deterministic", "npu", True))
    return turns, batches, cases
