"""The HVX kernels: on qemu-hexagon (v66), and over emulated intrinsics on the host, there as v66 and as v73.

The program of tests/hexagon/hvx_cases.cpp is started once per test with all its cases. What it answers on qemu-hexagon
is compared bit for bit with the portable kernels of the host; the emulated intrinsics are compared with qemu's one by
one, so that the kernels with HVX floating point (v73), which no emulator here runs, can be checked through them. The
integer kernels compiled for v73 run where QEMU knows that CPU (10.0 does, 7.2 does not).
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hvx_kit as guest
import k_quants
import numpy as np
import numpy.typing as npt
import pytest
from hvx_kit import HVX, PORTABLE, Op, Request
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from bench import hvx_packets

ROOT = Path(__file__).resolve().parents[2]


Array = npt.NDArray[Any]
COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_qemu = pytest.mark.skipif(guest.missing() is not None, reason=str(guest.missing()))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the emulated kernels")

# As in enum gemm_format.
FORMATS = {"q4": 0, "q8": 1, "iq4nl": 2, "prepared": 3, "q5_0": 4, "q4_1": 5, "q5_1": 6, "mxfp4": 7}
FORMATS |= {"q1_0": 8, "q2_0": 9, "nvfp4": 10}
K_FORMATS = (
    *(Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q2_K, Type.Q3_K, Type.IQ4_XS, Type.TQ2_0, Type.TQ1_0),
    *(Type.IQ2_XXS, Type.IQ2_XS, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S, Type.IQ1_M),
)
QUANTS = {"q4": 512, "q8": 1024, "iq4nl": 512, "prepared": 1024, "q5_0": 640, "q4_1": 512, "q5_1": 640, "mxfp4": 512}
QUANTS |= {"q1_0": 128, "q2_0": 256, "nvfp4": 512}
TILED = [Type.Q4_0_COL, Type.Q8_0_COL, Type.IQ4_NL_COL, Type.Q4_0_TILE, Type.Q8_0_TILE, Type.IQ4_NL_TILE]


def _build(arch: int, folder: Path) -> list[str]:
    kernels = ROOT / "backend" / "npu" / "kernels"
    sources = [
        ROOT / "tests" / "hexagon" / "hvx_cases.cpp",
        *sorted((kernels / "hvx").glob("*.cpp")),
        *sorted((kernels / "portable").glob("*.cpp")),
        *(ROOT / "ggml_ext" / "src" / name for name in ("grid_blocks.c", "k_panels.c", "layout.c", "types.c")),
    ]
    places = ("tests/hexagon/emulated", "backend/npu", "ggml_ext/include", "ggml_ext/src")
    flags = ["-O0", "-ffp-contract=off", "-Wno-psabi", f"-D__HVX_ARCH__={arch}", *(f"-I{ROOT / p}" for p in places)]

    def compile_one(numbered: tuple[int, Path]) -> str:
        number, source = numbered
        target = str(folder / f"{number}.o")
        language = ["-x", "c", "-std=c11"] if source.suffix == ".c" else ["-std=c++17"]
        subprocess.run([str(COMPILER), *flags, *language, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate(sources)))
    program = str(folder / "hvx_cases")
    subprocess.run([str(COMPILER), *objects, "-o", program], check=True)
    return [program]


@pytest.fixture(scope="module")
def host66(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The portable kernels, and v66 over emulated intrinsics."""
    return _build(66, tmp_path_factory.mktemp("v66"))


@pytest.fixture(scope="module")
def host73(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """v73 over emulated intrinsics."""
    return _build(73, tmp_path_factory.mktemp("v73"))


def programs(request: pytest.FixtureRequest, v73: bool = True) -> dict[str, list[str]]:
    """Every way to run the HVX kernels that there is here."""
    found: dict[str, list[str]] = {"emulated v66": request.getfixturevalue("host66")}
    if v73:
        found["emulated v73"] = request.getfixturevalue("host73")
    if guest.missing() is None:
        found["qemu"] = guest.command()
    if (command := guest.command_v73()) is not None:
        found["qemu v73"] = command
    return found


def tiles(quants: int, n: int, rng: np.random.Generator, float_scales: bool = False, scales_of: int = 32) -> Array:
    """Random tiles: any quants; scales (and minima) of any size and sign, zeros among them."""
    size = np.exp2(rng.uniform(-12, 3, (n, scales_of))) * rng.choice([-1, 1, 1, 0], (n, scales_of))
    scales = size.astype(np.float32 if float_scales else np.float16)
    data = rng.integers(0, 256, (n, quants), np.uint8)
    return np.concatenate([data, scales.view(np.uint8)], axis=1)


# ---- the emulation itself


@needs_qemu
@needs_compiler
def test_emulated_intrinsics_are_those_of_qemu(host66: list[str]) -> None:
    count = int.from_bytes(
        guest.ask(host66, [Request(Op.INTRINSIC, params=(1000,), operands=(np.zeros(1, np.uint8),))])[0], "little"
    )
    assert count > 30
    rng = np.random.default_rng(1)
    requests = []
    for number in range(count):
        for case in range(12):
            operands = rng.integers(0, 2**32, (4, 32), np.uint32)
            if case % 2:
                operands[1] = operands[1] & 0x3F3F3F3F | rng.integers(0, 2, 32, np.uint32) * 0xFFFFFFC0  # shifts
            if case % 3 == 0:
                operands[0, ::2] = operands[1, ::2]  # equal numbers
            scalar = int(rng.integers(-(2**31), 2**31)) if case % 4 else case // 4
            requests.append(Request(Op.INTRINSIC, params=(number, scalar), operands=(operands,)))
    emulated = guest.ask(host66, requests)
    real = guest.ask(guest.command(), requests)
    wrong = {r.params[0] for r, a, b in zip(requests, real, emulated, strict=True) if a != b}
    assert not wrong


# ---- int8 GEMM


def _gemm_cases(seed: int, cases: int) -> list[tuple[str, Any, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for case in range(cases):
        name = list(FORMATS)[case % len(FORMATS)]
        rows = int(rng.integers(1, 17)) if case >= 16 * len(FORMATS) else case // len(FORMATS) + 1
        k_tiles = int(rng.integers(1, 7))
        halves = 64 if name.endswith("_1") else 32
        panel = tiles(QUANTS[name], k_tiles, rng, float_scales=name == "prepared", scales_of=halves)
        if name == "mxfp4":  # exponents in place of scales
            panel = np.concatenate([panel[:, :512], rng.integers(108, 136, (k_tiles, 32), np.uint8)], axis=1)
        if name == "nvfp4":  # any bytes, NaN among them
            panel[:, 512:] = rng.choice([0x7F, 0xFF, *range(256)], (k_tiles, 64))
        x = (rng.standard_normal((rows, 32 * k_tiles)) * np.exp2(rng.integers(-20, 20))).astype(np.float32)
        if case % 5 == 0:
            x[rng.integers(rows), :32] = 0
        if case % 7 == 0:
            x[rng.integers(rows), rng.integers(32 * k_tiles)] = rng.choice([np.nan, np.inf])
        if case % 11 == 0:  # the largest sums there can be
            panel[:, : QUANTS[name]] = rng.choice([0x00, 0x80, 0xFF, 0x7F])
            x[:] = 3.0
        out = rng.standard_normal((rows, 32)).astype(np.float32)
        params, operands = (FORMATS[name], rows, k_tiles, case % 2), (panel, x, out)
        found.append((name, Request(Op.GEMM, HVX, params, operands), Request(Op.GEMM, PORTABLE, params, operands)))
    return found


def _gemm_k_cases(seed: int) -> list[tuple[str, Any, Any]]:
    """Every type of 256 k, numbers of rows around those that go together, over all bytes with finite scales."""
    rng = np.random.default_rng(seed)
    found = []
    for format, type in enumerate(K_FORMATS, len(FORMATS)):
        for rows in (1, 3, 4, 6, 9):
            blocks = int(rng.integers(1, 4))
            panel = k_quants.make_weights(Type[f"{type.name}_COL"], 256 * blocks, 32, rng).data
            x = (rng.standard_normal((rows, 256 * blocks)) * np.exp2(rng.integers(-20, 20))).astype(np.float32)
            if rows == 3:
                x[0, :256] = 0
                x[1, 7] = np.nan
            if rows == 4:
                x[:] = rng.choice([-1, 1], x.shape)  # as large as integers get
            operands = (panel, x, rng.standard_normal((rows, 32)).astype(np.float32))
            params = (format, rows, 8 * blocks, rows % 2)
            requests = [Request(Op.GEMM, kernels, params, operands) for kernels in (HVX, PORTABLE)]
            found.append((type.name, *requests))
    return found


@needs_compiler
@pytest.mark.parametrize("cases", [_gemm_cases(2, 320), _gemm_k_cases(4)], ids=["blocks of 32", "blocks of 256"])
def test_gemm_has_the_portable_bits(request: pytest.FixtureRequest, host66: list[str], cases: list[Any]) -> None:
    """With HVX floating point nearly so."""
    want = guest.ask(host66, [portable for _, _, portable in cases])
    for way, command in programs(request).items():
        got = guest.ask(command, [hvx for _, hvx, _ in cases])
        for (name, hvx, _), a, b in zip(cases, got, want, strict=True):
            x, y = np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)
            if way == "emulated v73":
                scale = np.abs(y[np.isfinite(y)]).max(initial=1e-30)
                same = np.allclose(x, y, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)
            else:
                same = np.array_equal(x, y, equal_nan=True)
            assert same, f"{way}: {name} {hvx.params}"


# ---- dequantization


def hmx_order(values: Array) -> Array:
    """(n, 32, 32) tiles as [k][column] to the order of the matrix unit: each two rows interleaved."""
    n = values.shape[0]
    return values.reshape(n, 16, 2, 32).transpose(0, 1, 3, 2).reshape(n, 1024)


def dequantized(kind: Type, data: Array) -> Array:
    """FP16 tiles (n, [k][column]) by the contract's reference code."""
    n = data.shape[0]
    values = ggml_ext.dequantize(kind, data.reshape(-1), 32 * n, 32)  # (32, 32 n)
    with np.errstate(over="ignore"):
        return values.reshape(32, n, 32).transpose(1, 2, 0).astype(np.float16)


def same_halves(a: Array, b: Array) -> bool:
    """Equal bits, but any NaN is as good as another."""
    nan = np.isnan(a.view(np.float16)) & np.isnan(b.view(np.float16))
    return bool(np.all((a.view(np.uint16) == b.view(np.uint16)) | nan))


@needs_compiler
@pytest.mark.parametrize("kind", TILED, ids=lambda k: k.name)
def test_dequantization_is_exact(kind: Type, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(int(kind))
    quants = ggml_ext.tile_bytes(kind) - 64
    data = tiles(quants, 24, rng)
    # every size of scale: subnormal, largest, infinite, not a number
    bits = rng.integers(0, 65536, (8, 32), np.uint16)
    bits[0, :6] = [0x0001, 0x03FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]
    data[16:, quants:] = bits.view(np.uint8)
    want = dequantized(kind, data)
    for way, command in programs(request).items():
        single, several, floats = guest.ask(
            command,
            [
                Request(Op.TILES, params=(kind, 1), operands=(data[:1],)),
                Request(Op.TILES, params=(kind, len(data)), operands=(data,)),
                Request(Op.DEQUANTIZE, params=(kind, len(data)), operands=(data,)),
            ],
        )
        ordered = hmx_order(want)
        assert same_halves(np.frombuffer(several, np.float16).reshape(-1, 1024), ordered), way
        assert same_halves(np.frombuffer(single, np.float16), ordered[0]), way
        wide = np.frombuffer(floats, np.float32).reshape(want.shape)
        assert np.array_equal(wide, want.astype(np.float32), equal_nan=True), way


# ---- exponent


@needs_compiler
def test_exponent_of_every_fp16_number(request: pytest.FixtureRequest) -> None:
    x = np.arange(65536, dtype=np.uint16)
    v = x.view(np.float16).astype(np.float64)
    with np.errstate(all="ignore"):
        want = np.exp2(np.where(v > 0, 0, v)).astype(np.float16)
    for way, command in programs(request, v73=False).items():
        requests = [Request(Op.EXP2, operands=(x,)), Request(Op.EXP2, operands=(x[:77],))]
        whole, part = (np.frombuffer(a, np.float16) for a in guest.ask(command, requests))
        assert same_halves(whole, want), way
        assert same_halves(part, want[:77]), way


# ---- conversions


@needs_compiler
def test_conversions(request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(7)
    halves = np.arange(65536, dtype=np.uint16)
    edges = (halves[:0x7C00].astype(np.uint32) << 13) + (112 << 23)  # every FP16 number as float, and what is near
    bits = np.concatenate(
        [edges, edges + 0x0FFF, edges + 0x1000, edges + 0x1001, rng.integers(0, 2**32, 50_013, np.uint32)]
    )
    tiny = np.exp2(rng.uniform(-30, -12, 5000)).astype(np.float32).view(np.uint32)
    floats = np.concatenate([bits, tiny, tiny | 0x80000000]).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        rounded = floats.astype(np.float16)
    for way, command in programs(request, v73=False).items():
        requests = [
            Request(Op.TO_FLOAT, operands=(halves,)),
            Request(Op.TO_HALF, operands=(floats,)),
            Request(Op.ROUND, operands=(floats,)),
        ]
        wide, narrow, both = guest.ask(command, requests)
        assert np.array_equal(
            np.frombuffer(wide, np.float32), halves.view(np.float16).astype(np.float32), equal_nan=True
        ), way
        assert same_halves(np.frombuffer(narrow, np.float16), rounded), way
        assert np.array_equal(np.frombuffer(both, np.float32), rounded.astype(np.float32), equal_nan=True), way


# ---- the matrix unit's model


@needs_compiler
@pytest.mark.parametrize("kind", TILED, ids=lambda k: k.name)
def test_fp16_numerics_on_tiles(kind: Type, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(100 + int(kind))
    requests, want = [], []
    for rows, n in [(1, 1), (5, 3), (32, 2)]:
        data = tiles(ggml_ext.tile_bytes(kind) - 64, n, rng)
        x = rng.standard_normal((rows, 32 * n)).astype(np.float32)
        requests.append(Request(Op.FP16, params=(kind, rows, n), operands=(data, x)))
        w = dequantized(kind, data).reshape(32 * n, 32).astype(np.float32)
        total = np.zeros((rows, 32), np.float32)
        for k in range(32 * n):
            total += x[:, k, None].astype(np.float16).astype(np.float32) * w[k]
        with np.errstate(over="ignore"):
            want.append(total.astype(np.float16).astype(np.float32))
    for way, command in programs(request).items():
        for a, b in zip(guest.ask(command, requests), want, strict=True):
            assert np.array_equal(np.frombuffer(a, np.float32).reshape(b.shape), b), way


def _in_order(x: Array, w: Array) -> Array:
    """x @ w summed in float32 in the order of k, rounded to FP16."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(len(w)):
        total += x[:, k, None].astype(np.float32) * w[k].astype(np.float32)
    return total.astype(np.float16).astype(np.float32)


@needs_compiler
def test_products_of_attention_on_the_matrix_unit(request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(9)
    shapes = [(1, 1, 32), (7, 64, 64), (32, 33, 128), (33, 31, 40), (128, 64, 80), (2, 2, 1), (65, 50, 65)]
    requests, want = [], []
    for rows, cells, dim in shapes:
        for kind, number in ((Type.F16, np.float16), (Type.F32, np.float32)):
            q, k, v = (rng.standard_normal((n, dim)).astype(np.float16) for n in (rows, cells, cells))
            p = np.zeros((rows, 64), np.float16)
            p[:, :cells] = rng.random((rows, cells)) * (rng.random((rows, cells)) < 0.8)
            operands = (q.astype(np.float32), k.astype(number), v.astype(number), p.astype(np.float32))
            requests.append(Request(Op.ATTENTION, HVX, (rows, cells, dim, kind), operands))
            want.append((_in_order(q, k.T), _in_order(p[:, :cells], v)))
    for way, command in programs(request).items():
        for asked, got, (s, o) in zip(requests, guest.ask(command, requests), want, strict=True):
            numbers = np.frombuffer(got, np.float32)
            assert np.array_equal(numbers[: s.size].reshape(s.shape), s), f"{way}: {asked.params}"
            assert np.array_equal(numbers[s.size :].reshape(o.shape), o), f"{way}: {asked.params}"


# ---- what is compiled and counted


def cannot_count() -> str | None:
    """Why nothing can be disassembled here, None if it can."""
    try:
        hvx_packets.library_v73()
    except FileNotFoundError:
        return "this build has no hexagon/libhvx_v73.a: it needs clang-19, lld-19 and libc++-19-dev"
    return None if hvx_packets.objdump() else "no llvm-objdump for Hexagon (package llvm-19)"


needs_objdump = pytest.mark.skipif(cannot_count() is not None, reason=str(cannot_count()))


@needs_objdump
def test_counted_loops_are_the_kernels() -> None:
    loops = hvx_packets.static_loops()
    assert set(loops) == set(hvx_packets.DEQUANTIZATION) | set(hvx_packets.EXPONENTS)
    for name, loop in loops.items():
        # what a loop writes, it must have read, and multiplied in HVX floating point
        assert loop.count(r"= vmemu?\(") >= 1, name
        if name != "exp2, table":
            assert loop.count("qf16|qf32") >= loop.written // 64, name
        assert ":endloop0" in loop.packets[-1]
        assert not any(":endloop0" in p for p in loop.packets[:-1])
    # a tile of 4 bits is five vectors; it becomes sixteen by eight look-ups, scaled by one vector or by sixteen
    for name, spreads in (("q4_0 column", 1), ("iq4_nl column", 1), ("q4_0 tile", 16)):
        assert loops[name].written == 1024
        assert loops[name].count(r"= vmemu\(") == 5
        assert loops[name].count("vlut16") == 8
        assert loops[name].count("vdelta") == spreads
    for name in hvx_packets.DEQUANTIZATION:
        assert loops[name].least <= len(loops[name].packets), name
    conventional = loops["conventional"]
    assert conventional.count("vscatter") * 32 == conventional.written
    assert loops["conventional, tuned"].count("vscatter") * 64 == loops["conventional, tuned"].written
    assert loops["conventional, no tables"].count("vlut16") == 0
    table = loops["exp2, table"]
    assert table.count("vgather") * 64 == table.written
