"""Every model family that llama.cpp can run, as tiny random models, on the device HMX0 against the CPU backend.

    python tests/archs/run.py [-a REGEX] [-j N] [--json FILE]

llama.cpp's test-llama-archs makes the models and runs those in float32 itself: prompts of several batches, causal
attention off and on, a model saved and loaded again. Of what it saves (five families it cannot save), Q8_0 models are
made, run plain and repacked.
For each model the table has the errors against the CPU backend (NMSE), whether the repacked model gives the plain one's
bits, and the splits of the graph of one token: two are the fewest, as the token embedding is on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kits"))
import accuracy
import upstream
from accuracy import Job, Result, WorkerError
from tilebeam import gguf as gguf_tools
from tilebeam.model.cache_size import cache_of

HEADERS = Path(__file__).resolve().parent / "common"
SEED = "1"
# Architectures by the beginnings of their names: parts of about the same work.
PARTS = ("[abc]", "[def]", "[ghij]", "[klm]", "[nop]", "[q-z]")
N_POSITIONS = 52
JOB = Job("", mode="mixed", n_positions=N_POSITIONS, n_threads=1, n_ctx=256, n_batch=256, n_ubatch=64)
# Limits of the errors against the CPU backend. Float32 differs by the order of sums and by the CPU backend's FP16
# tables of activations (GELU). Both round activations to int8 for Q8_0; one family feeds rounded values back six times.
FLOAT32_LIMIT = 1e-6
Q8_0_LIMIT = 1e-3
Q8_0_LIMITS = {"hrm_text-dense": 5e-3}


@dataclass
class Family:
    """What was found of one model. NMSE are relative to the CPU backend's logits; None: not run to its end."""

    name: str  # such as "llama-moe"
    float32: float | None = None
    q8_0: float | None = None
    repacked: bool | None = None  # the same bits as the plain model's
    splits: int = 0
    misplaced: dict[str, str] = field(default_factory=dict)  # tensors that are not where gguf_tools says; where
    problems: list[str] = field(default_factory=list)


def build() -> Path:
    """Compile the program where that has not been done yet."""
    return upstream.build("test-llama-archs", "archs", ["llama", "ggml", "ggml-base", "ggml-cpu"], HEADERS)


def _program(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    command = [str(build()), "-s", SEED, *arguments]
    return subprocess.run(
        command, env=upstream.environment(), capture_output=True, text=True, errors="replace", timeout=timeout
    )


def read_table(text: str) -> dict[str, Family]:
    """Families from the program's table, in its order; the last line may have been cut off by a crash."""
    families: dict[str, Family] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) < 3 or cells[2] not in ("MoE", "Dense"):
            continue
        family = Family(f"{cells[0]}-{cells[2].lower()}")
        outcome = " ".join(cells[3:])
        if outcome.startswith("SKIP"):
            continue
        families[family.name] = family
        found = re.fullmatch(r"(\w+)(?: \((\w+)\))? *\((\S+)\) (\w+)", outcome)
        if not found:
            family.problems.append(f"float32: ends in {outcome!r}")
            continue
        family.float32 = float(found[3])
        if found[1] != "OK" or found[4] not in ("OK", "SKIP"):
            family.problems.append(f"float32: {outcome}")
    return families


def run_float32(pattern: str, timeout: float = 300) -> dict[str, Family]:
    """The program's own tests of the architectures whose names match."""
    done = _program(["-b", upstream.DEVICE, "-a", pattern], timeout)
    families = read_table(done.stdout)
    broken = any(f.problems for f in families.values())
    if done.returncode != 0 and not broken:
        families["?"] = Family("?", problems=[f"float32: {pattern} ended with status {done.returncode}"])
    if done.returncode != 0:
        list(families.values())[-1].problems.append(done.stderr.strip()[-1000:])
    return families


def save(pattern: str, folder: Path, timeout: float = 300) -> list[Path]:
    """Write the models of the architectures whose names match, float32."""
    done = _program(["-o", str(folder), "-a", pattern], timeout)
    if done.returncode != 0:
        raise RuntimeError(f"models of {pattern} were not written: {done.stderr.strip()[-1000:]}")
    return sorted(folder.glob("*.gguf"))


def quantize(model: Path) -> tuple[Path, Path]:
    """Q8_0 models from a float32 one, plain and repacked; the source is removed."""
    repacked, plain = model.with_suffix(".repacked"), model.with_suffix(".q8_0")
    gguf_tools.pack(model, repacked, type="q8_0", threads=1)
    gguf_tools.unpack(repacked, plain, threads=1)
    model.unlink()
    return plain, repacked


def _nmse(want: accuracy.F32, got: accuracy.F32) -> float:
    a, b = want.astype(np.float64), got.astype(np.float64)
    return float(((a - b) ** 2).sum() / (a**2).sum())


def _compare(family: Family, results: Sequence[Result | WorkerError]) -> None:
    """From logits on the CPU, on the device, and on the device of the repacked model."""
    cpu, plain, _, tiled = results
    family.problems += [str(r) for r in results if isinstance(r, WorkerError)]
    if isinstance(plain, Result):
        family.splits = plain.splits[1]
        if isinstance(cpu, Result):
            family.q8_0 = _nmse(cpu.logits, plain.logits)
        if isinstance(tiled, Result):
            family.repacked = np.array_equal(plain.logits.view(np.uint32), tiled.logits.view(np.uint32))


def _misplaced(model: Path, places: Result | WorkerError) -> dict[str, str]:
    """Products that ran elsewhere than the file's list of tensors says (those with rows are not in the list), and
    tensors that were elsewhere than `gguf-repack inspect` shows."""
    if isinstance(places, WorkerError):
        return {}
    with gguf_tools.open_gguf(model) as f:
        planned = {m.name: "cpu" if m.why else "npu" for m in gguf_tools.matrices_of(f)}
        matrices = {t.name for t in f.tensors.values() if t.rows > 1}
    ran = {name: place for name, place in places.products.items() if name in matrices}
    if not ran:
        return {"every matrix": "?"}
    shown = {t["name"]: t["device"].lower() for t in gguf_tools.inspect(model)["tensors"]}
    moved = {name: place for name, place in places.weights.items() if place not in shown.get(name, place)}
    return {n: place for n, place in ran.items() if planned.get(n) != place} | moved


def _overcounted(model: Path, job: Job, cache_mib: float) -> str | None:
    """What `tilebeam.load` refuses a model for must not be more than llama.cpp takes; it refuses diffusion models."""
    with gguf_tools.open_gguf(model) as f:
        counted = cache_of(f, gguf_tools.architecture_of(f))
    mib = job.n_ctx * 2 * (counted.k + counted.v) / 2**20
    return f"its KV cache has {cache_mib} MiB, not {mib:.2f}" if cache_mib and mib > cache_mib + 0.01 else None


def run_part(pattern: str, folder: Path) -> dict[str, Family]:
    """All that is asked of the architectures whose names match."""
    folder.mkdir(parents=True)
    families = run_float32(pattern)
    pairs = {}
    for path in save(pattern, folder):
        name = path.stem
        family = families.setdefault(name, Family(name, problems=["float32: not run"]))
        try:
            pairs[name] = quantize(path)
        except gguf_tools.GGUFError as error:
            family.problems.append(f"not repacked: {error}")
    jobs = []
    for plain, repacked in pairs.values():
        watched = replace(_job(plain, "npu"), mode="prefill", n_positions=8, products=True)
        jobs += [_job(plain, "cpu"), _job(plain, "npu"), watched, _job(repacked, "npu")]
    results = accuracy.run(jobs, folder / "logits")
    for i, (name, (plain, _)) in enumerate(pairs.items()):
        _compare(families[name], results[4 * i : 4 * i + 4])
        families[name].misplaced = _misplaced(plain, results[4 * i + 2])
        if isinstance(found := results[4 * i], Result) and (much := _overcounted(plain, found.job, found.cache_mib)):
            families[name].problems.append(much)
    for file in folder.glob("*.*"):
        file.unlink()
    return families


def _job(model: Path, device: str) -> Job:
    return Job(**(asdict(JOB) | {"model": str(model), "device": device}))


def run(patterns: Sequence[str], folder: Path, jobs: int) -> dict[str, Family]:
    """Parts side by side."""
    build()
    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(run_part, patterns, [folder / str(i) for i in range(len(patterns))])
        return {name: family for part in parts for name, family in part.items()}


def problems(family: Family) -> list[str]:
    """What is wrong with the outcome of one model, as sentences."""
    found = [f"{family.name}: {problem}" for problem in family.problems]
    if family.float32 is not None and not family.float32 <= FLOAT32_LIMIT:
        found.append(f"{family.name}: float32 is {family.float32:.1e} from the CPU backend's")
    if family.q8_0 is not None and not family.q8_0 <= Q8_0_LIMITS.get(family.name, Q8_0_LIMIT):
        found.append(f"{family.name}: q8_0 is {family.q8_0:.1e} from the CPU backend's")
    if family.misplaced:
        found.append(f"{family.name}: not where gguf_tools says: {family.misplaced}")
    if family.repacked is False:
        found.append(f"{family.name}: the repacked model gives other bits than the plain one")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-a", "--arch", help="regex over the names of architectures; all if not given")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes at a time, of one thread each")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    patterns = [args.arch] if args.arch else [f"^{part}" for part in PARTS]
    with tempfile.TemporaryDirectory(prefix="tilebeam-archs-") as folder:
        families = run(patterns, Path(folder), args.jobs)
    print(f"{'model':24} {'float32':>9} {'q8_0':>9} {'repacked':>9} {'splits':>7}")
    for family in sorted(families.values(), key=lambda f: (f.splits, f.name)):
        errors = ["-" if e is None else f"{e:.1e}" for e in (family.float32, family.q8_0)]
        same = {None: "-", True: "same", False: "differs"}[family.repacked]
        print(f"{family.name:24} {errors[0]:>9} {errors[1]:>9} {same:>9} {family.splits:7}")
        for problem in problems(family):
            print(f"    {problem}")
    print(f"{sum(f.splits == 2 for f in families.values())} of {len(families)} models in two splits")
    if args.json:
        args.json.write_text(json.dumps([asdict(f) for f in families.values()], indent=2) + "\n")
    return 1 if any(map(problems, families.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
