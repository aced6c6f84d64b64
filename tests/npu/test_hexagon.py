"""The executor compiled for Hexagon, under qemu-hexagon: its C library, whole models, its channel, and its end.

Ops on it are the kernel sets "qemu-hvx" and "qemu-portable" of the ops' own tests (test_vector_ops.py and its
siblings); test_hvx.py looks at the HVX kernels one by one.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import numpy.typing as npt
import process_kit
import pytest
from accuracy import Job
from hexagon_kit import hexagon_session, missing
from npu_kit import SharedArray, Vec, add
from tilebeam.measure import doctor

from bench.lib.built import built
from bench.lib.synth import preset, write_model

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

Array = npt.NDArray[Any]


def guest(name: str) -> list[str]:
    """The command that runs a program of tests/hexagon."""
    return ["qemu-hexagon", str(built(f"hexagon/{name}"))]


# --- the C library ---------------------------------------------------------------------------------------------------


def on_guest(function: str, x: Array) -> Array:
    """What the runtime's function gives for these numbers."""
    run = subprocess.run([*guest("runtime_cases"), function], input=x.tobytes(), capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    return np.frombuffer(run.stdout, x.dtype)


def float_inputs(kind: type, n: int, seed: int) -> Array:
    """Any bits at all, numbers of ordinary size, and every pair of the special ones; n is even."""
    rng = np.random.default_rng(seed)
    word = np.uint32 if kind is np.float32 else np.uint64
    any_bits: Array = rng.integers(0, 2**64, n, np.uint64).astype(word).view(kind)
    ordinary: Array = (rng.standard_normal(n) * np.exp(rng.uniform(-8, 8, n))).astype(kind)
    info = np.finfo(kind)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, info.tiny, info.max, -info.max, info.smallest_subnormal]
    special += [0.5, 1.5, 2.5, -2.5, info.tiny / 3, 2.0**info.nmant + 0.5, 88.7, -103.9, 1e-3]
    pairs: Array = np.array(list(itertools.product(special, special)), kind).reshape(-1)
    return np.concatenate([any_bits, ordinary, pairs])


def same(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """The same bits, or both NaN."""
    return np.asarray((a.view(f"u{a.itemsize}") == b.view(f"u{a.itemsize}")) | (np.isnan(a) & np.isnan(b)))


def ulps(got: Array, want: Array, kind: type) -> float:
    """The largest distance in units of the last place; infinite where one is no number or too large and the other is
    not. `want` is more exact than `kind`."""
    rounded: Array = want.astype(kind)
    finite = np.isfinite(rounded)
    if not np.all(same(got[~finite], rounded[~finite])) or not np.all(np.isfinite(got[finite])):
        return math.inf
    return float(np.max(np.abs(got[finite].astype(want.dtype) - want[finite]) / np.spacing(np.abs(rounded[finite]))))


EXACT_FLOATS: dict[str, Callable[..., Array]] = {
    "addf": np.add,
    "mulf": np.multiply,
    "divf": np.divide,
    "sqrtf": np.sqrt,
    "floorf": np.floor,
    "ceilf": np.ceil,
    "truncf": np.trunc,
    "roundf": lambda x: np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x).astype(np.float32),
}
EXACT_DOUBLES: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rint": np.rint,
    "float": lambda x: x.astype(np.float32).astype(np.float64),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [*EXACT_FLOATS, *EXACT_DOUBLES])
def test_arithmetic_is_exact(name: str) -> None:
    kind = np.float32 if name in EXACT_FLOATS else np.float64
    x = float_inputs(kind, 10000, 1)
    function = (EXACT_FLOATS | EXACT_DOUBLES)[name]
    two = isinstance(function, np.ufunc) and function.nin == 2
    want = function(x[0::2], x[1::2]) if two else function(x)
    assert np.all(same(on_guest(name, x), want.astype(kind)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scaling_is_exact() -> None:
    rng = np.random.default_rng(2)
    powers = float_inputs(np.float64, 4000, 3)
    powers[1::2] = rng.integers(-2300, 2300, powers.size // 2)
    assert np.all(same(on_guest("ldexp", powers), np.ldexp(powers[0::2], powers[1::2].astype(int))))
    finite = powers[np.isfinite(powers) & (powers != 0)]
    assert np.array_equal(on_guest("ilogb", finite), np.frexp(finite)[1] - 1)
    whole = np.trunc(rng.standard_normal(2000) * 10.0 ** rng.integers(0, 18, 2000))
    assert np.array_equal(on_guest("int64", whole), whole)


# Largest error in units of the last place. A result rounded once is within 0.5.
FUNCTIONS: dict[str, tuple[Callable[..., Any], float]] = {
    "expf": (np.exp, 1.0),
    "exp2f": (np.exp2, 1.0),
    "logf": (np.log, 0.51),
    "sinf": (np.sin, 0.51),
    "cosf": (np.cos, 0.51),
    "tanhf": (np.tanh, 0.51),
    "erff": (np.vectorize(math.erf, otypes=[np.float64]), 0.51),
    "erfcf": (np.vectorize(math.erfc, otypes=[np.float64]), 0.51),
    "powf": (np.power, 0.51),
    "exp": (np.exp, 2.0),
    "exp2": (np.exp2, 2.0),
    "log": (np.log, 3.0),
    "log2": (np.log2, 3.0),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mathematics(name: str) -> None:
    function, most = FUNCTIONS[name]
    kind = np.float32 if name.endswith("f") else np.float64
    x = float_inputs(kind, 4000, 4)
    exact = x.astype(np.float64 if kind is np.float32 else np.longdouble)
    want = np.power(exact[0::2], exact[1::2]) if name == "powf" else function(exact)
    assert ulps(on_guest(name, x), np.asarray(want), kind) <= most


@pytest.mark.parametrize("bits", [32, 64])
def test_integer_division(bits: int) -> None:
    rng = np.random.default_rng(5)
    unsigned, signed = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    x = rng.integers(0, 2**bits, 8000, unsigned) >> rng.integers(0, bits, 8000).astype(unsigned)
    x[1::2] |= x[1::2] == 0
    n, d = x[0::2], x[1::2]
    assert np.array_equal(on_guest(f"udiv{bits}", x), n // d)
    assert np.array_equal(on_guest(f"umod{bits}", x), n % d)
    pairs = [(int(a), int(b)) for a, b in zip(n.view(signed), d.view(signed), strict=True)]
    quotients = [abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in pairs]
    if bits == 32 or -(2**63) not in (a for a, _ in pairs):
        assert on_guest(f"div{bits}", x).view(signed).tolist() == quotients
        assert on_guest(f"mod{bits}", x).view(signed).tolist() == [
            a - b * q for (a, b), q in zip(pairs, quotients, strict=True)
        ]


def test_memory_that_runs_out() -> None:
    """Nothing is thrown over here: the program ends, and its exit code says why."""
    run = subprocess.run([*guest("runtime_cases"), "memory"], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (112, "tilebeam-npud-hexagon: out of memory\n")


def test_threads_have_objects_of_their_own() -> None:
    """pthread_create and join, thread-local objects of every kind, and errno."""
    run = subprocess.run([*guest("runtime_cases"), "threads"], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "4 threads\n"), run.stderr


# --- whole models ----------------------------------------------------------------------------------------------------


# Llama with both kernel sets, one token at a time with ordinary tensors of every kind; then the ops that only other
# architectures have: biases, per-head norms, a window, soft caps.
JOBS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"env": {"TILEBEAM_ISA": "hvx"}}),
    ("llama", {}, {"env": {"TILEBEAM_ISA": "portable"}, "mode": "decode", "n_positions": 6}),
    ("llama", {"type": "q8_0", "types": {"ffn_down": "f16"}}, {"kv": "q8_0"}),
    ("qwen3", {"type": "iq4_nl"}, {"env": {"TILEBEAM_NUMERICS": "fp16"}}),
    ("gemma3", {}, {"mode": "decode", "n_positions": 6}),
]


@pytest.mark.parametrize(("arch", "changes", "options"), JOBS, ids=lambda v: v if isinstance(v, str) else "")
def test_model_has_the_host_s_logits(
    arch: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    file = write_model(tmp_path / "model.gguf", preset("tiny", arch=arch, n_layer=2, **{"type": "q4_0", **changes}))
    job = {"device": "npu", "n_positions": 16, "n_ctx": 256, **options}
    host = {**job, "env": {**job.get("env", {}), "TILEBEAM_ISA": "portable"}}
    want, got = accuracy.run([Job(str(file), **host), Job(str(file), **job, executor="qemu-hexagon")], tmp_path)
    result, reference = accuracy.got(got), accuracy.got(want)
    assert (result.executor, reference.executor) == ("qemu-hexagon", "thread")
    assert result.failures == 0
    assert result.graphs > 0
    figures = accuracy.compare(reference.logits, result.logits)
    # Only roundings of float32 functions differ, which may tip single steps of int8 activations or FP16 exponents.
    assert figures.nmse < 1e-5
    assert figures.kl < 1e-5


# --- the channel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[SharedArray]:
    array = SharedArray(1 << 16)
    array.floats[:] = 1.0
    yield array
    array.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_session(threads: int, memory: SharedArray) -> None:
    rng = np.random.default_rng(6)
    with hexagon_session(n_threads=threads) as s:
        assert (s.isa, s.threads) == ("hvx", threads)
        assert s.alive
        buffer = s.map(memory)
        n = 16384
        a, b, c = (Vec(4 * n * i, n, buffer=buffer) for i in range(3))
        for serial in (0, 7, 7, 7):  # whole, kept, patched
            memory.floats[: 2 * n] = rng.standard_normal(2 * n)
            assert s.compute([add(c, a, b), add(c, c, b)], serial).status == 0
            x, y = memory.floats[:n], memory.floats[n : 2 * n]
            assert np.array_equal(memory.floats[2 * n : 3 * n], x + y + y)
        beyond = s.compute([add(Vec(4 << 16, n, buffer=buffer), a, b)])
        assert beyond.name == "TB_E_BOUNDS"
        assert s.set_threads(2).status == 0
        assert s.threads == 2
        assert s.unmap(buffer).status == 0
        assert s.compute([add(c, a, b)]).name == "TB_E_BUFFER"
        assert s.noop().status == 0


def test_file_ranges_that_start_on_small_pages(tmp_path: Path) -> None:
    """The emulator's pages are 64 KiB, those of the protocol 4 KiB."""
    data = np.arange(1 << 17, dtype=np.float32)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    out = SharedArray(1024)
    fd = os.open(path, os.O_RDONLY)
    try:
        with hexagon_session(n_threads=1) as s:
            target = s.map(out)
            for page in (1, 5, 15, 16, 17, 100):
                outcome, source = s.map_fd(fd, 8192, offset=4096 * page, writable=False)
                assert outcome.status == 0, outcome.why
                x = Vec(4096, 1024, buffer=source)
                assert s.compute([add(Vec(0, 1024, buffer=target), x, x)]).status == 0
                assert np.array_equal(out.floats, 2 * data[1024 * (page + 1) :][:1024])
                assert s.unmap(source).status == 0
            assert s.map_fd(fd, 4096, offset=100, writable=False)[0].name == "TB_E_BOUNDS"
    finally:
        os.close(fd)
        out.close()


def test_addresses_of_32_bits(memory: SharedArray) -> None:
    """3 GiB of mappings, and a clear word for what does not fit."""
    fd = os.memfd_create("tilebeam-test-large", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 6 << 30)  # no memory until it is touched
        with hexagon_session(n_threads=1) as s:
            for size in (5 << 30, (3 << 30) + 4096):
                outcome, _ = s.map_fd(fd, size)
                assert outcome.name == "TB_E_NOMEM"
                assert re.search("memory limit|address space|Cannot allocate", outcome.why), outcome.why
            assert "only the first 4 GiB of a file" in s.map_fd(fd, 1 << 30, offset=(3 << 30) + 4096)[0].why
            outcome, buffer = s.map_fd(fd, 1 << 30, offset=5 << 29)
            assert outcome.status == 0, outcome.why
            n, end = 64, 7 << 29
            last = Vec((1 << 30) - 4 * n, n, buffer=buffer)
            os.pwrite(fd, np.full(n, 3, np.float32).tobytes(), end - 4 * n)
            assert s.compute([add(last, last, last)]).status == 0
            assert np.all(np.frombuffer(os.pread(fd, 4 * n, end - 4 * n), np.float32) == 6)
            assert s.map_fd(fd, 3 << 30)[0].name == "TB_E_NOMEM"
            assert s.map(memory) >= 0
    finally:
        os.close(fd)


def test_truncated_file_ends_the_emulator_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    out = SharedArray(1024)
    fd = os.open(path, os.O_RDONLY)
    try:
        with hexagon_session(n_threads=1) as s:
            target = s.map(out)
            _, source = s.map_fd(fd, 1 << 20, writable=False)
            os.truncate(path, 0)
            x = Vec(1 << 19, 1024, buffer=source)
            outcome = s.compute([add(Vec(0, 1024, buffer=target), x, x)])
            assert outcome.name == "TB_E_DEAD"
            assert "mapped file was truncated" in outcome.why
            assert not s.alive
    finally:
        os.close(fd)
        out.close()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="npud-x' was not built: install the packages clang-19"):
        hexagon_session(npud_path=str(tmp_path / "npud-x"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="No such file or directory; qemu-hexagon comes with the package qemu-user"):
        hexagon_session()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"no kernels named 'avx2', only hvx portable"):
        hexagon_session(isa="avx2")


def test_it_ends_with_its_program() -> None:
    """Killed without a word, a program leaves no emulator behind."""
    code = """
import os, signal
from hexagon_kit import hexagon_session
s = hexagon_session(n_threads=1)
print(s.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = process_kit.python(code)
    pid = int(run.stdout)
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]:
        assert time.monotonic() < end, "the emulator survived its program"
        time.sleep(0.05)


def test_doctor_tries_it() -> None:
    report = doctor.DoctorReport()
    assert "kernel set hvx" in doctor._hexagon(report)
    assert report.facts["executors"]["qemu-hexagon"]["own_process"]
