"""Logits of whole models on any device, through llama.cpp's own C API, and the figures to compare them with.

Every job runs in a process of its own making (`run`), the stock CPU backend in one that never loads the plugin: a crash
is a test failure that names the job, and nothing of one run reaches another. The worker is this same file run as a
script: it reads jobs as JSON and writes each job's logits as an .npy file.

The modes feed the same kind of tokens in the ways that matter to a decoder:
    prefill    all positions in one batch, logits of each
    decode     the same positions one token at a time
    mixed      the same positions, the last 4 of them one token at a time, all others in one batch
    parallel   a prompt shared by 16 sequences (every prompt cell carries all their ids), then 16 tokens a step
    streams    16 sequences that share nothing, for caches with one stream per sequence
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
N_PARALLEL = 16
N_PROMPT = 32  # of random tokens, in mode parallel
N_STEPS = 4  # of one token, in mode mixed
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """One run of one model. `device` is "cpu" (stock, no plugin in the process) or "npu"."""

    model: str
    device: str = "cpu"
    mode: str = "prefill"
    n_positions: int = 256
    tokens: tuple[int, ...] = ()  # empty: random ones from `seed`; parallel: a prompt before n_positions more
    seed: int = 0
    n_threads: int = 2
    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    kv: str = "f16"  # f16, f32, q8_0, q4_0
    flash: bool = True
    swa_full: bool = True
    kv_unified: bool = True
    n_gpu_layers: int = -1  # npu only
    executor: str = "thread"  # npu only: thread, process
    lora: tuple[tuple[str, float], ...] = ()  # adapter files and their scales
    products: bool = False  # also say where the products with weights ran, and where weights are
    shift: int = 0  # decode: before the last half, drop this many cells after the first 4 and shift the rest
    env: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{Path(self.model).name} on {self.device}, {self.mode}"


@dataclass(frozen=True)
class Result:
    """`logits`: float32 [positions, vocabulary]. `splits`: graph splits at the largest batch and at one token.
    `cache_mib`: of the KV cache, in MiB with two digits.

    `graphs`, `ops` and `failures` count what the device computed during the run (0 without the plugin). `products`, if
    the job asks for it: for each tensor that MUL_MAT or MUL_MAT_ID read, or of which it read a part, where its result
    was: "npu" or "cpu"; and `weights`: where each tensor is that an op read.
    """

    job: Job
    logits: F32
    splits: tuple[int, int]
    cache_mib: float
    graphs: int
    ops: int
    failures: int
    executor: str
    npu_pid: int
    pid: int
    products: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)


class WorkerError(AssertionError):
    """The worker process failed or died: the message has the job, how it ended and the end of its output."""


# --- asking -----------------------------------------------------------------------------------------------------------


def run(jobs: Sequence[Job], folder: Path, timeout: float = 300) -> list[Result | WorkerError]:
    """Runs the jobs, in order, and returns each one's result, or the error that ended its worker.

    Jobs with the same surroundings share a process, and those of one model that follow each other load it once; when
    the process dies, the job it died of is the error's, and the jobs after it run in a new one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[int, Result | WorkerError] = {}
    groups: dict[str, list[int]] = {}
    for i, job in enumerate(jobs):
        key = json.dumps([job.device, job.executor, job.n_threads, job.env], sort_keys=True)
        groups.setdefault(key, []).append(i)
    for group in groups.values():
        left = list(group)
        while left:
            replies, error = _ask([(i, jobs[i]) for i in left], folder, timeout)
            results |= replies
            left = [i for i in left if i not in replies]
            if left and error is not None:
                results[left.pop(0)] = error
    return [results[i] for i in range(len(jobs))]


def got(result: Result | WorkerError) -> Result:
    """The result itself; raises the error if it is one."""
    if isinstance(result, WorkerError):
        raise result
    return result


def _ask(
    jobs: list[tuple[int, Job]], folder: Path, timeout: float
) -> tuple[dict[int, Result | WorkerError], WorkerError | None]:
    spec = [{"index": i, "out": str(folder / f"{i}.npy"), **asdict(job)} for i, job in jobs]
    command = [sys.executable, str(Path(__file__).resolve())]
    how = ""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(spec),
            capture_output=True,
            text=True,
            env=environment(jobs[0][1]),
            timeout=timeout,
            check=False,
        )
        out, err = done.stdout, done.stderr
        if done.returncode:
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as e:
        out, err = ((v or b"").decode(errors="replace") for v in (e.stdout, e.stderr))
        how = f"no end after {timeout:.0f} s"
    results: dict[int, Result | WorkerError] = {}
    for line in out.splitlines():
        if line.startswith("RESULT "):
            reply = json.loads(line[7:])
            index = reply.pop("index")
            path = folder / f"{index}.npy"
            logits = np.load(path, mmap_mode="r")
            path.unlink()  # the pages live as long as the array
            splits = tuple(reply.pop("splits"))
            results[index] = Result(job=dict(jobs)[index], logits=logits, splits=splits, **reply)
    if len(results) == len(jobs):
        return results, None
    failed = next(job for i, job in jobs if i not in results)
    return results, WorkerError(f"{failed.label}: {how or 'no reply'}\n{failed}\n{err[-3000:]}")


def environment(job: Job) -> dict[str, str]:
    """The worker's environment: this one's, with the job's executor and threads, and the packages importable."""
    paths = [str(ROOT / "python"), str(ROOT)] if (ROOT / "python").is_dir() else []
    env = {k: v for k, v in os.environ.items() if not k.startswith("TILEBEAM_") or k == "TILEBEAM_LIB_DIR"}
    if "TILEBEAM_LIB_DIR" in env:  # a checkout, not an installed package
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    env["TILEBEAM_NPU"] = job.executor
    return env | job.env


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """How far logits are from a reference: all means over positions.

    `kl`: KL divergence of the softmax from the reference's, nats. `top1`: share of equal arg max. `nmse`: squared
    error over squared reference, both after removing each row's mean, which the softmax does not see.
    """

    kl: float
    top1: float
    nmse: float


def compare(reference: F32, logits: F32) -> Figures:
    """Figures of `logits` against `reference`, both [positions, vocabulary]."""
    assert reference.shape == logits.shape
    assert np.isfinite(reference).all()
    assert np.isfinite(logits).all()
    kl = error = power = 0.0
    agree = 0
    for r32, x32 in zip(reference, logits, strict=True):
        r, x = r32.astype(np.float64), x32.astype(np.float64)
        agree += int(r.argmax() == x.argmax())
        r -= r.mean()
        x -= x.mean()
        difference = x - r
        error += float(difference @ difference)
        power += float(r @ r)
        likely = np.exp(r - r.max())
        total = likely.sum()
        kl += _log_sum_exp(x) - float(r.max() + np.log(total) + likely @ difference / total)
    n = len(reference)
    return Figures(kl=kl / n, top1=agree / n, nmse=error / power)


def _log_sum_exp(row: npt.NDArray[np.float64]) -> float:
    top = row.max()
    return float(top + np.log(np.exp(row - top).sum()))


# --- the worker -------------------------------------------------------------------------------------------------------


def _batches(job: Job, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[Any, list[int], list[list[int]], list[bool]]]:
    """(tokens, positions, sequence ids, wanted) of each llama_decode call."""
    n = len(tokens)
    if job.mode in ("prefill", "decode", "mixed"):
        steps = {"prefill": 0, "decode": n, "mixed": N_STEPS}[job.mode]
        cuts = [*range(0, n - steps, job.n_batch), *range(n - steps, n + 1)]
        for start, end in pairwise(cuts):
            m = end - start
            yield tokens[start:end], list(range(start, end)), [[0]] * m, [True] * m
    elif job.mode == "parallel":
        # The last n_positions tokens are 16 continuations, one after the other, of what comes before them.
        everyone = list(range(N_PARALLEL))
        n_prompt = n - job.n_positions
        yield tokens[:n_prompt], list(range(n_prompt)), [everyone] * n_prompt, [False] * (n_prompt - 1) + [True]
        continuations = tokens[n_prompt:].reshape(N_PARALLEL, -1)
        for step in range(continuations.shape[1]):
            column = continuations[:, step]
            yield column, [n_prompt + step] * N_PARALLEL, [[s] for s in everyone], [True] * N_PARALLEL
    elif job.mode == "streams":
        n_prompt = 8
        everyone = list(range(N_PARALLEL))
        prompts = np.resize(tokens, N_PARALLEL * n_prompt)
        yield (
            prompts,
            list(range(n_prompt)) * N_PARALLEL,
            [[s] for s in everyone for _ in range(n_prompt)],
            [i % n_prompt == n_prompt - 1 for i in range(N_PARALLEL * n_prompt)],
        )
        for step in range(n // N_PARALLEL):
            picked = np.roll(tokens, step)[:N_PARALLEL]
            yield picked, [n_prompt + step] * N_PARALLEL, [[s] for s in everyone], [True] * N_PARALLEL
    else:
        raise ValueError(f"unknown mode {job.mode!r}")


@contextmanager
def _log_capture() -> Iterator[list[str]]:
    """Everything llama.cpp and the plugin log, also passed on to stderr."""
    import llama_cpp

    lines: list[str] = []

    def receive(_level: int, text: bytes, _data: Any) -> None:
        lines.append(text.decode(errors="replace"))
        sys.stderr.write(lines[-1])

    callback = llama_cpp.llama_log_callback(receive)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    yield lines
    # The callback must outlive every later message of this process: keep it.
    _KEEP.append(callback)


_KEEP: list[Any] = []


@contextmanager
def open_model(job: Job) -> Iterator[Any]:
    """A loaded llama_model, freed on exit."""
    import llama_cpp as lc

    params = lc.llama_model_default_params()
    params.n_gpu_layers = 0
    if job.device == "npu":
        import tilebeam
        from tilebeam.native.control import control

        tilebeam.register()
        control().configure(executor=job.executor, n_threads=job.n_threads)
        params.n_gpu_layers = job.n_gpu_layers
    model = lc.llama_model_load_from_file(os.fsencode(job.model), params)
    if not model:
        raise RuntimeError(f"{job.model}: not loaded")
    try:
        yield model
    finally:
        lc.llama_model_free(model)


@contextmanager
def open_context(job: Job, model: Any) -> Iterator[Any]:
    """A llama_context for the job, freed on exit."""
    import llama_cpp as lc

    kv_type = {"f16": 1, "f32": 0, "q4_0": 2, "q8_0": 8}[job.kv]
    p = lc.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch = job.n_ctx, job.n_batch, job.n_ubatch
    p.n_seq_max = N_PARALLEL if job.mode in ("parallel", "streams") else 1
    p.n_threads = p.n_threads_batch = job.n_threads
    p.type_k = p.type_v = kv_type
    p.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_ENABLED if job.flash else lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.kv_unified, p.swa_full = job.kv_unified, job.swa_full
    if job.products:
        p.cb_eval = _recorder()
    ctx = lc.llama_init_from_model(model, p)
    if not ctx:
        raise RuntimeError(f"{job.label}: no context")
    try:
        yield ctx
    finally:
        lc.llama_free(ctx)


_PRODUCTS: dict[str, str] = {}  # of the job in progress
_WEIGHTS: dict[str, str] = {}


def _recorder() -> Any:
    """What the scheduler asks before every node of a graph; it is told not to stop there."""
    import llama_cpp as lc
    from graph_watch import Tensor, operation

    ops = {operation("MUL_MAT"), operation("MUL_MAT_ID")}
    base = ctypes.CDLL("libggml-base.so.0")
    base.ggml_backend_buffer_name.restype = ctypes.c_char_p
    base.ggml_backend_buffer_name.argtypes = [ctypes.c_void_p]

    def root(t: Any) -> Any:
        return root(Tensor.from_address(t.view_src)) if t.view_src else t

    def place(t: Any) -> str:
        return "npu" if t.buffer and base.ggml_backend_buffer_name(t.buffer).startswith(b"HMX") else "cpu"

    def asked(address: Any, _ask: bool, _data: Any) -> bool:
        node = Tensor.from_address(ctypes.cast(address, ctypes.c_void_p).value or 0)
        read = [root(source.contents) for source in node.src if source]
        _WEIGHTS.update((t.name.decode(errors="replace"), place(t)) for t in read)
        if node.op in ops:
            _PRODUCTS[read[0].name.decode()] = place(root(node))
        return False

    _PRODUCTS.clear()
    _WEIGHTS.clear()
    _KEEP.append(lc.ggml_backend_sched_eval_callback(asked))
    return _KEEP[-1]


@contextmanager
def adapted(job: Job, model: Any, ctx: Any) -> Iterator[None]:
    """The context with the job's LoRA adapters in force."""
    import llama_cpp as lc

    adapters = []
    for path, _ in job.lora:
        adapters.append(lc.llama_adapter_lora_init(model, os.fsencode(path)))
        if not adapters[-1]:
            raise RuntimeError(f"{path}: not an adapter of this model")
    pointers = (lc.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
    scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in job.lora))
    if adapters and lc.llama_set_adapters_lora(ctx, pointers, len(adapters), scales):
        raise RuntimeError("the adapters were refused")
    try:
        yield
    finally:
        lc.llama_set_adapters_lora(ctx, None, 0, None)
        for adapter in adapters:
            lc.llama_adapter_lora_free(adapter)


def decode(ctx: Any, tokens: Any, positions: list[int], sequences: list[list[int]], wanted: list[bool]) -> None:
    """One llama_decode; raises RuntimeError with its status if that is not 0."""
    import llama_cpp as lc

    n = len(tokens)
    batch = lc.llama_batch_init(n, 0, N_PARALLEL)
    try:
        batch.n_tokens = n
        for i in range(n):
            batch.token[i] = int(tokens[i])
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = len(sequences[i])
            for j, s in enumerate(sequences[i]):
                batch.seq_id[i][j] = s
            batch.logits[i] = wanted[i]
        status = lc.llama_decode(ctx, batch)
    finally:
        lc.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")


def _logits(job: Job, model: Any, log: list[str]) -> tuple[F32, dict[str, Any], dict[str, Any]]:
    import llama_cpp as lc

    log.clear()
    with open_context(job, model) as ctx, adapted(job, model, ctx):
        text = "".join(log)
        cache = sum(map(float, re.findall(r"KV buffer size = +([\d.]+) MiB", text)))
        said = {"splits": _splits(text), "cache_mib": cache}
        n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
        if job.tokens:
            tokens = np.array(job.tokens, np.int32)
        else:
            n = job.n_positions + (N_PROMPT if job.mode == "parallel" else 0)
            tokens = np.random.default_rng(job.seed).integers(3, n_vocab, n).astype(np.int32)
        rows = []
        done = 0
        for part, positions, sequences, wanted in _batches(job, tokens):
            if job.shift and done == job.n_positions // 2:
                memory = lc.llama_get_memory(ctx)
                lc.llama_memory_seq_rm(memory, 0, 4, 4 + job.shift)
                lc.llama_memory_seq_add(memory, 0, 4 + job.shift, -1, -job.shift)
            if job.shift and done >= job.n_positions // 2:
                positions = [p - job.shift for p in positions]
            decode(ctx, part, positions, sequences, wanted)
            out = lc.llama_get_logits(ctx)
            rows.append(np.ctypeslib.as_array(out, (sum(wanted), n_vocab)).copy())
            done += len(part)
        return np.concatenate(rows), said, _counters(job)


def _splits(log: str) -> tuple[int, int]:
    found = re.findall(r"splits = (\d+)(?: / (\d+))?", log)
    if not found:
        return (0, 0)
    first, second = found[-1]
    return int(first), int(second or first)


def _counters(job: Job) -> dict[str, Any]:
    if job.device == "cpu":
        return {"graphs": 0, "ops": 0, "failures": 0, "executor": "", "npu_pid": 0}
    from tilebeam.native.control import control

    status = control().status()
    return {k: status[k] for k in ("graphs", "ops", "failures", "executor", "npu_pid")}


def _worker() -> int:
    asked = []
    for spec in json.load(sys.stdin):
        index, out = spec.pop("index"), spec.pop("out")
        spec["tokens"] = tuple(spec["tokens"])
        spec["lora"] = tuple((path, scale) for path, scale in spec["lora"])
        asked.append((index, out, Job(**spec)))
    for _, same in groupby(asked, lambda item: (item[2].model, item[2].n_gpu_layers)):
        jobs = list(same)
        print(f"--- {jobs[0][2]}", file=sys.stderr, flush=True)
        before = _counters(jobs[0][2])
        with _log_capture() as log, open_model(jobs[0][2]) as model:
            for index, out, job in jobs:
                print(f"--- {job}", file=sys.stderr, flush=True)
                logits, said, running = _logits(job, model, log)
                np.save(out, logits)
                after = _counters(job)
                reply = {"index": index, "pid": os.getpid(), **said}
                if job.products:
                    reply |= {"products": _PRODUCTS, "weights": _WEIGHTS}
                reply |= {k: after[k] - before[k] for k in ("graphs", "ops", "failures")}
                reply |= {k: running[k] for k in ("executor", "npu_pid")}
                before = after
                print("RESULT " + json.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_worker())
