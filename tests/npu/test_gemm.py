"""MUL_MAT on every kernel set against numpy: int8 numerics, float weights, FP16 numerics, layouts, hostile input."""

from __future__ import annotations

import npu_ops as t
import numpy as np
import pytest
from gemm_reference import (
    BLOCKS,
    COLUMN,
    FLAG_FP16,
    FLOATS,
    MORE_BLOCKS,
    MORE_COLUMN,
    TILE,
    Weights,
    device,
    float_product,
    int8_error_bound,
    int8_product,
    make_weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.native import executor as _npu

QUANTIZED = (*BLOCKS, *COLUMN, *TILE, *MORE_BLOCKS, *MORE_COLUMN)
isas = t.runs_with_hvx
dims = {
    "k": st.sampled_from([32, 64, 96, 160, 1024, 1056, 2080]),
    "n": st.sampled_from([1, 3, 31, 32, 33, 64, 96, 130]),
    "m": st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 33, 50]),
    "threads": st.integers(1, 3),
    "seed": st.integers(0, 2**32 - 1),
}


def check_int8(w: Weights, x: np.ndarray, out: np.ndarray) -> None:
    model, magnitude = int8_product(w, x)
    # float32 sums over K/32 terms, each a product of rounded factors
    assert np.all(np.abs(out - model) <= magnitude * (2.0**-23) * (w.k / 32 + 4) + 1e-30)
    exact = x.astype(np.float64) @ w.values.T
    assert np.all(np.abs(out - exact) <= int8_error_bound(w, x) + magnitude * 1e-5)


@isas
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda w: w.label)
@settings(max_examples=12, deadline=None)
@given(**dims)
def test_int8(isa: str, type: Type, k: int, n: int, m: int, threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = make_weights(type, k, n, rng)
    x = (rng.standard_normal((m, w.k)) * np.exp2(rng.integers(-20, 20, (m, 1)))).astype(np.float32)
    out = device(isa, threads).product(w, x)
    check_int8(w, x, out)
    other = device("portable", 1).product(w, x)
    _, magnitude = int8_product(w, x)
    assert np.all(np.abs(out - other) <= magnitude * (2.0**-22) * (w.k / 32 + 4) + 1e-30)


@isas
@pytest.mark.parametrize("type", [*COLUMN, *MORE_COLUMN], ids=lambda w: w.label)
def test_plain_rows_and_tiles_agree_bit_for_bit(isa: str, type: Type) -> None:
    rng = np.random.default_rng(5)
    plain = make_weights(ggml_ext.source_type(type), 2080, 70, rng)
    tiles = Weights(type, plain.k, plain.n, ggml_ext.pack(type, plain.data.reshape(-1), plain.k, plain.n), plain.values)
    for m in (1, 6, 19):
        x = rng.standard_normal((m, plain.k)).astype(np.float32)
        np.testing.assert_array_equal(device(isa, 2).product(plain, x), device(isa, 2).product(tiles, x))


@pytest.mark.skipif("amx" not in _npu.isas(), reason="needs a CPU with AMX")
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda w: w.label)
def test_the_matrix_unit_has_the_bits_of_vectors(type: Type) -> None:
    """Any number of rows, in groups of any size: integers are exact, and floats come in the same order."""
    rng = np.random.default_rng(7)
    w = make_weights(type, 1280, 70, rng)
    for m in (*range(1, 36), 48, 63, 64, 65, 97, 127, 128, 129, 200, 257):
        x = rng.standard_normal((m, w.k)).astype(np.float32)
        np.testing.assert_array_equal(device("amx", 2).product(w, x), device("avx512vnni", 2).product(w, x), str(m))


@isas
def test_largest_magnitudes_do_not_saturate(isa: str) -> None:
    k, n = 64, 32
    x = np.full((3, k), 127, np.float32)
    x[1, ::2] = -127
    x[2] = -127
    for value in (-128, -127, 127):
        blocks = np.zeros((n, k // 32, 34), np.uint8)
        blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks[..., 2:] = np.int8(value).view(np.uint8)
        w = Weights(Type.Q8_0, k, n, blocks, np.full((n, k), float(value)))
        np.testing.assert_array_equal(device(isa, 1).product(w, x), x.astype(np.float64) @ w.values.T)
    for nibble in (0, 15):
        blocks = np.zeros((n, k // 32, 18), np.uint8)
        blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks[..., 2:] = nibble * 17
        w = Weights(Type.Q4_0, k, n, blocks, np.full((n, k), nibble - 8.0))
        np.testing.assert_array_equal(device(isa, 1).product(w, x), x.astype(np.float64) @ w.values.T)
    for type, values in ((Type.Q5_0, (-16, 15)), (Type.Q4_1, (0, 15)), (Type.Q5_1, (0, 31))):
        for bits, value in zip((0, 255), values, strict=True):
            blocks = np.full((n, k // 32, ggml_ext.row_bytes(type, 32)), bits, np.uint8)
            blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
            if type != Type.Q5_0:
                blocks[..., 2:4] = np.array([3.0], np.float16).view(np.uint8)
            least = 0 if type == Type.Q5_0 else 3
            w = Weights(type, k, n, blocks, np.full((n, k), float(value + least)))
            np.testing.assert_array_equal(device(isa, 1).product(w, x), x.astype(np.float64) @ w.values.T)

    for nibble, value in ((7, 12), (15, -12)):
        blocks = np.full((n, k // 32, 17), nibble * 17, np.uint8)
        blocks[..., 0] = 128  # 2^0
        w = Weights(Type.MXFP4, k, n, blocks, np.full((n, k), float(value)))
        np.testing.assert_array_equal(device(isa, 1).product(w, x), x.astype(np.float64) @ w.values.T)


@isas
def test_scales_of_mxfp4_are_powers_of_two(isa: str) -> None:
    """Each from the smallest, which is subnormal, to the largest: exact where products are numbers."""
    x = np.zeros((5, 32), np.float32)
    x[:, 3] = [1, -2, 0.5, 2**20, 2.0**-20]
    rows = np.zeros((256, 17), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 4] = 1
    values = np.zeros((256, 32))
    values[:, 3] = np.exp2(np.arange(256) - 128.0)
    out = device(isa, 1).product(Weights(Type.MXFP4, 32, 256, rows, values), x)
    exact = x.astype(np.float64) @ values.T
    told = (np.abs(exact) < 2.0**120) & (np.abs(exact) > 2.0**-110)
    np.testing.assert_allclose(out[told], exact[told], rtol=1e-6)
    assert np.all(np.abs(out[np.abs(exact) <= 2.0**-110]) <= 2.0**-109)


@t.runs_with_bf16
@pytest.mark.parametrize("type", FLOATS, ids=lambda w: w.label)
@settings(max_examples=12, deadline=None)
@given(
    **{
        **dims,
        "k": st.sampled_from([1, 2, 7, 16, 31, 64, 100, 257, 300, 530]),
        "m": st.sampled_from([1, 2, 4, 5, 9, 50, 97, 101, 130]),
    }
)
def test_float_weights(isa: str, type: Type, k: int, n: int, m: int, threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = make_weights(type, k, n, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    exact, bound = float_product(w, x, isa)
    assert np.all(np.abs(device(isa, threads).product(w, x) - exact) <= bound)
    if type == Type.F16:
        half = x.astype(np.float16)
        out = device(isa, threads).product(w, half)
        assert np.all(np.abs(out - half.astype(np.float64) @ w.values.T) <= bound * 1.01)


@isas
@pytest.mark.parametrize("type", [*QUANTIZED, *FLOATS], ids=lambda w: w.label)
@settings(max_examples=8, deadline=None)
@given(**dims)
def test_fp16_numerics(isa: str, type: Type, k: int, n: int, m: int, threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = make_weights(type, k, n, rng)
    x = (rng.standard_normal((m, w.k)) / 16).astype(np.float32)
    out = device(isa, threads).product(w, x, flags=FLAG_FP16)
    a = x.astype(np.float16).astype(np.float64)
    b = w.values.astype(np.float32).astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(out, out.astype(np.float16).astype(np.float32))
    exact, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    assert np.all(np.abs(out - exact) <= np.abs(exact) * 2.0**-11 + magnitude * 2.0**-22 * w.k + 2.0**-24)


@isas
@settings(max_examples=25, deadline=None)
@given(
    type=st.sampled_from([Type.F16, Type.F32, Type.Q4_0, Type.Q8_0, Type.Q4_0_COL, Type.Q8_0_TILE, *MORE_COLUMN]),
    half=st.booleans(),
    b2=st.integers(1, 3),
    b3=st.integers(1, 2),
    r2=st.integers(1, 3),
    r3=st.integers(1, 2),
    m=st.sampled_from([1, 2, 5, 18]),
    n=st.sampled_from([5, 32, 77]),
    order=st.permutations([0, 1, 2]),
    pad=st.sampled_from([0, 32]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_and_strides(
    isa: str,
    type: Type,
    half: bool,
    b2: int,
    b3: int,
    r2: int,
    r3: int,
    m: int,
    n: int,
    order: list[int],
    pad: int,
    threads: int,
    seed: int,
) -> None:
    """src0 broadcasts over dimensions 2 and 3; src1 has any order of its outer dimensions, and gaps between rows."""
    rng = np.random.default_rng(seed)
    k = 128
    matrices = [[make_weights(type, k, n, rng) for _ in range(b2)] for _ in range(b3)]
    stack = np.stack([[w.data.reshape(-1) for w in row] for row in matrices]).view(np.uint8)
    size = stack.shape[2]
    row = size // n if type in FLOATS or type in BLOCKS else 1
    nb = (int(ggml_ext.lib.tb_type_size(type)) or 1, row, size, size * b2)

    outer = (b3 * r3, b2 * r2, m)
    x_type = np.float16 if half and type == Type.F16 else np.float32
    memory = rng.standard_normal((*(outer[i] for i in order), k + pad)).astype(x_type)
    x = memory.transpose(*(order.index(i) for i in range(3)), 3)[..., :k]
    out = device(isa, threads).mul_mat(stack, type, (k, n, b2, b3), nb, x, dst_pad=pad)
    for i3 in range(outer[0]):
        for i2 in range(outer[1]):
            w, rows = matrices[i3 // r3][i2 // r2], x[i3, i2]
            if type in FLOATS:
                exact = rows.astype(np.float64) @ w.values.T
                np.testing.assert_allclose(out[i3, i2], exact, rtol=0, atol=2e-4)
            else:
                check_int8(w, rows, out[i3, i2])


@isas
@pytest.mark.parametrize("type", [Type.F16, Type.F32, Type.Q8_0], ids=lambda w: w.label)
def test_weight_rows_with_gaps(isa: str, type: Type) -> None:
    """K and V views of attention without flash: rows of one head, heads interleaved."""
    rng = np.random.default_rng(11)
    k, n, heads = 64, 40, 3
    matrices = [make_weights(type, k, n, rng) for _ in range(heads)]
    rows = np.stack([w.data.reshape(n, -1).view(np.uint8) for w in matrices], axis=1)  # (n, heads, bytes)
    row = rows.shape[2]
    nb = (int(ggml_ext.lib.tb_type_size(type)), row * heads, row, row * heads * n)
    for m in (1, 9):
        x = rng.standard_normal((1, heads, m, k)).astype(np.float32)
        out = device(isa, 2).mul_mat(rows, type, (k, n, heads, 1), nb, x)
        for h, w in enumerate(matrices):
            if type == Type.Q8_0:
                check_int8(w, x[0, h], out[0, h])
            else:
                np.testing.assert_allclose(out[0, h], x[0, h].astype(np.float64) @ w.values.T, rtol=0, atol=2e-4)


@isas
@pytest.mark.parametrize("type", QUANTIZED, ids=lambda w: w.label)
def test_hostile_activations(isa: str, type: Type) -> None:
    """A zero row gives zeros. NaN or infinity in a row gives NaN in that row, and nowhere else."""
    rng = np.random.default_rng(3)
    w = make_weights(type, 96, 40, rng)
    x = rng.standard_normal((7, w.k)).astype(np.float32)
    x[1] = 0
    x[2, 50] = np.nan
    x[3, 95] = np.inf
    x[4, 0] = -np.inf
    x[5] = 1e-45
    x[6] *= np.float32(1e34)
    out = device(isa, 2).product(w, x)
    assert np.all(out[1] == 0)
    assert np.all(out[5] == 0)
    assert np.all(np.isnan(out[2:5]))
    check_int8(w, x[[0, 6]], out[[0, 6]])
    one_by_one = np.concatenate([device(isa, 1).product(w, x[i : i + 1]) for i in range(7)])
    np.testing.assert_array_equal(out, one_by_one)


@isas
@pytest.mark.parametrize("type", TILE, ids=lambda w: w.label)
def test_scales_that_are_no_numbers(isa: str, type: Type) -> None:
    """A file may hold any bits: a NaN or infinite scale spoils the columns that share it, and no others."""
    rng = np.random.default_rng(4)
    w = make_weights(type, 64, 64, rng)
    for bad in (np.nan, np.inf):
        data = w.data.copy()
        data.reshape(2, 2, -1)[1, 0, -64:].view(np.float16)[5] = bad  # row pair 2, columns 16 to 31 of panel 1
        out = device(isa, 1).product(
            Weights(type, w.k, w.n, data, w.values), rng.standard_normal((3, 64)).astype(np.float32)
        )
        assert np.all(np.isnan(out[:, 48:]))
        assert np.all(np.isfinite(out[:, :48]))


@pytest.mark.parametrize("isa", _npu.isas())
def test_kernel_names(isa: str) -> None:
    rng = np.random.default_rng(6)
    seen = set()
    for type in (*QUANTIZED, *FLOATS):
        for m in (1, 128):
            name: list[str] = []
            x = rng.standard_normal((m, 128)).astype(np.float32)
            device(isa, 1).product(make_weights(type, 128, 32, rng), x, name=name)
            assert name[0].startswith("gemm_")
            # AVX-VNNI adds integer kernels to those of AVX2, i8mm to those of NEON, AVX512-BF16 one to AVX-512's, AMX
            # integer kernels to those
            under = {"avxvnni": ("avx2",), "i8mm": ("neon",), "avx512bf16": ("avx512vnni",)}
            under["amx"] = ("avx512vnni", "avx512bf16")
            assert name[0].split("_")[-1] in (isa, *under.get(isa, ()))
            seen.add(name[0])
    floats = {"f32d", "f16d", "bf16d", "f32"}
    column = {"q4c", "q8c", "nlc", "q50c", "q41c", "q51c", "mx4c", "q10c", "q20c", "nv4c"}
    assert {name.split("_")[1] for name in seen} == column | floats | {"q8p"}
