"""Every model family of llama.cpp and every type of weights against the stock CPU backend: a prompt, and 1, 4 and 16
sequences that decode together; what `device="auto"` takes, and the worst ratio of it.

    python -m bench.families [--only REGEX] [--rows 1,4,16] [-p 64] [-t 2] [--json] [--quick]
        [--resume FILE --seconds S]

The models are random. Those of families (a name such as qwen3moe-moe) have upstream's own metadata (test-llama-archs),
1024 wide, mixtures 512 with 8 experts of which 2 are used, four layers where the family allows it, quantized to Q4_K_M
by llama.cpp; those of types (a name such as type-iq2_xxs) are Llama models of that type, the output in Q6_K. They are
written on first use to build/bench/families (6 GB), by a program that is compiled from llama.cpp's source. Both sides
run in a process for each model, in turn; models that end theirs, or cannot be loaded, are named below the table. All
models get one round, 3 to 4 seconds with loading; then those that Tilebeam was not clearly faster with get more.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError, load
from tilebeam.cli.bench import numbers
from tilebeam.measure.throughput import Case, Runner
from tilebeam.model import device_choice
from tilebeam.model.file_check import inspect
from tilebeam.model.load_options import LoadOptions

from bench.lib import CACHE, ROOT, child, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

sys.path.insert(0, str(ROOT / "tests" / "kits"))
import upstream

FOLDER = CACHE / "families"
Q4_K_M = "15"  # of llama.cpp's types of files
TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q6_K", "q5_K", "q4_K", "q3_K", "q2_K", "iq4_nl"),
    *("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq1_0", "tq2_0", "mxfp4", "nvfp4"),
    *("q1_0", "q2_0"),
)
FLOOR = 0.97  # of the ratio to the stock backend, which no model may be below
CLEAR = 1.06  # rounds of a case vary by some percent: above this, one is enough
LOAD = 10.0  # seconds that a model and its first rounds take at most, in a slice


def program() -> Path:
    """Return the program that writes models, compiled where that has not been done yet."""
    libraries, source = ["llama", "ggml", "ggml-base", "ggml-cpu"], ROOT / "bench/lib/family_models.cpp"
    return upstream.build("test-llama-archs", "archs", libraries, ROOT / "tests/archs/common", source)


def make(family: str, quantization: str = Q4_K_M, folder: Path = FOLDER, width: int = 1024) -> list[Path]:
    """Write the models of a family, its dense one and its mixture.

    Raises:
        RuntimeError: there is none; says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(folder), f"^{family}$", str(width), str(width // 2), "4", quantization]
    done = subprocess.run(
        [program(), *arguments],
        env={**upstream.environment(), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    made = [Path(line) for line in done.stdout.splitlines() if line.endswith(".gguf")]
    if done.returncode or not made:
        raise RuntimeError(f"no model of {family}: {(done.stdout + done.stderr).strip()[-300:]}")
    return made


def models(pattern: str) -> Iterator[Path]:
    """Yield the models whose families or types match, written if need be."""
    families = subprocess.run([program(), "--list"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [name for name in (*families, *(f"type-{t}" for t in TYPES)) if re.search(pattern, name)]
    for i, name in enumerate(wanted, 1):
        print(f"{name}, {i} of {len(wanted)}", file=sys.stderr, flush=True)
        yield from _files(name)


def _files(name: str) -> list[Path]:
    """Return the models of one name."""
    found = [p for end in ("-dense", "-moe", "") if (p := FOLDER / f"{name}{end}.gguf").is_file()]
    if not found and name.startswith("type-"):
        made = make("llama", name.removeprefix("type-"), FOLDER / "new")
        found = [next(p for p in made if "dense" in p.name).rename(FOLDER / f"{name}.gguf")]
    return found or make(name)


def serve(path: str, threads: int, rows: list[int], n_prompt: int) -> None:
    """Take the side of the process that has a model on both backends."""
    warnings.simplefilter("ignore")
    try:
        room = max(n_prompt, 8 * max(rows))
        npu, cpu = (load(path, name, room, max(rows), threads, lookup=False) for name in ("npu", "cpu"))
    except TilebeamError as error:
        child.answer(str(error), lambda _: None)
        return
    runners = [Runner(lm) for lm in (npu, cpu)]

    def decode(side: int, case: Case) -> float:
        return runners[side].run(case).seconds

    def encode(side: int, case: Case) -> float:
        began = time.perf_counter()
        (npu, cpu)[side].embed([[1] * case.n_prompt])
        return time.perf_counter() - began

    def measure(n: int) -> dict[str, float]:
        case, run = Case(0, 8, n) if n else Case(n_prompt), decode if npu.info.generates else encode
        best = [float("inf")] * 2
        for side in range(2):
            run(side, replace(case, n_gen=min(1, case.n_gen)))  # touches what the case uses
        began = time.perf_counter()
        while time.perf_counter() - began < 0.3:
            time.sleep(report.PAUSE)
            best = [min(old, run(side, case)) for side, old in enumerate(best)]
        return {"ours": best[0], "baseline": best[1]}

    child.answer("", measure)


def measure(path: Path, cases: dict[str, int], log: Rounds, a: Any, wanted: int) -> str:
    """Measure cases of a model until each has as many rounds as wanted, or the time is over.

    Returns:
        Why there are none; empty where there are.
    """
    if not cases or log.fewest(cases) >= wanted or not log.has_time(LOAD):
        return ""
    rows = [int(n) for n in numbers(a.rows, "--rows")]
    try:
        with child.Child(
            "bench.families", "serve", str(path), a.threads, rows, a.n_prompt, GGML_NO_BACKTRACE="1"
        ) as side:
            if failure := str(side.ready):
                return failure
            for name in log.turns(cases, wanted):
                log.end(**side.ask(cases[name]))
    except RuntimeError as error:
        return str(error)
    return ""


def _cases(path: Path, cases: dict[str, int]) -> dict[str, int]:
    """Return what is measured of a model by name: an encoder only reads."""
    try:
        decodes = inspect(str(path), False).generates
    except TilebeamError:  # of a type that no loading knows; its process says so
        decodes = True
    return {f"{path.stem}, {title}": n for title, n in cases.items() if decodes or not n}


def main() -> None:
    p = Parser(__doc__, "one round, two families and two types")
    p.add_argument("--only", default="", metavar="REGEX", help="families, and types as in type-q4_K (default: all)")
    p.add_argument("--rows", default="1,4,16", help="sequences that decode together")
    p.add_count("-p", "--n-prompt", usual=64, quick=16, what="prompt tokens; 0: none")
    p.add_threads()
    p.add_rounds(3, 1)
    rounds.add_options(p)
    a = p.parse()
    cases = {f"{n} sequences" if n > 1 else "1 sequence": n for n in numbers(a.rows, "--rows")}
    cases |= {f"prompt of {a.n_prompt}": 0} if a.n_prompt else {}
    setting = {"bench": "families", "threads": a.threads, "n_prompt": a.n_prompt}
    log = Rounds(a.resume, setting, a.seconds, first=LOAD / 2)
    paths = list(models(a.only or ("^(llama|lfm2|type-q4_K|type-f16)$" if a.quick else "")))
    by_path = {path: _cases(path, cases) for path in paths}
    failures = {path: why for path, own in by_path.items() if (why := measure(path, own, log, a, 1))}
    for wanted in range(2, a.rounds + 1):
        for path, own in by_path.items():
            close = {c: n for c, n in own.items() if c in log and max(log.ratios(c)) < CLEAR}
            measure(path, close, log, a, wanted)
    found: list[dict[str, Any]] = []
    for path, own in by_path.items():
        if not any(name in log for name in own):
            continue
        choice = device_choice.choose(inspect(str(path), False), LoadOptions(n_seq_max=max(cases.values())).checked())
        for name, n in ((name, n) for name, n in own.items() if name in log):
            row = log.row(name, 8 * n if n else a.n_prompt, "tokens/s", auto=choice.backend, why=choice.why)
            found.append(row | {"auto_ratio": row["ratio"] if choice.backend == "npu" else 1.0})
    table = report.Rows("families", a.json)
    for row in sorted(found, key=lambda r: (r["auto_ratio"], r["ratio"])):
        taken = "Tilebeam" if row["auto"] == "npu" else "the CPU backend"
        table.add(row, *([f"auto takes {taken}: {row['why']}"] if row["ratio"] < FLOOR else []))
    notes = [f"{path.stem}: {why}" for path, why in failures.items()]
    for title in cases:
        ratios = [r["auto_ratio"] for r in found if r["name"].endswith(f", {title}")]
        if ratios:
            below = sum(r < FLOOR for r in ratios)
            notes.append(f"{title}: worst ratio of auto {min(ratios):.2f}; {below} of {len(ratios)} below {FLOOR}")
    table.finish({}, *notes)
    log.warn()


if __name__ == "__main__":
    report.start(main)
