"""Op checks: what is accepted, what is refused, and that nothing hostile passes or crashes.

Bytes touched are counted here one by one in Python, without the C code.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tilebeam._ext import Type, ffi, lib, row_bytes, tile_bytes

F32, F16, BF16, I32, I64 = Type.F32, Type.F16, Type.BF16, Type.I32, Type.I64
Q4_0, Q8_0, IQ4_NL = Type.Q4_0, Type.Q8_0, Type.IQ4_NL
TILED = [Type.Q4_0_COL, Type.Q8_0_COL, Type.IQ4_NL_COL, Type.Q4_0_TILE, Type.Q8_0_TILE, Type.IQ4_NL_TILE]
WEIGHTS = [F32, F16, BF16, Q4_0, Q8_0, IQ4_NL, *TILED]
SIZE = {F32: 4, F16: 2, BF16: 2, I32: 4, I64: 8}
NO_BUFFER = lib.TB_NO_BUFFER
OPS = range(1, lib.TB_OP_COUNT)


class Tensor:
    """A tb_tensor in Python: contiguous unless strides are given."""

    def __init__(self, type: Type, *ne: int, nb: list[int] | None = None, buffer: int = 0, offset: int = 0) -> None:
        self.type, self.buffer, self.offset = type, buffer, offset
        self.ne = [*ne, 1, 1, 1, 1][:4]
        self.nb = nb or self.contiguous()

    def contiguous(self) -> list[int]:
        if self.type in TILED:
            panels = -(-self.ne[1] // 32)
            matrix = panels * (self.ne[0] // 32) * tile_bytes(self.type)
            return [0, 0, matrix, matrix * self.ne[2]]
        first = SIZE.get(self.type) or row_bytes(self.type, 32)
        row = self.ne[0] * first if self.type in SIZE else self.ne[0] // 32 * first
        return [first, row, row * self.ne[1], row * self.ne[1] * self.ne[2]]

    def permuted(self, *order: int) -> Tensor:
        t = Tensor(self.type, *(self.ne[i] for i in order), buffer=self.buffer, offset=self.offset)
        t.nb = [self.nb[i] for i in order]
        return t

    def fill(self, c: Any) -> None:
        c.buffer, c.type, c.offset = self.buffer, self.type, self.offset
        c.ne, c.nb = self.ne, self.nb

    def bytes(self) -> set[int]:
        """Every byte of the buffer that an access to all elements touches."""
        if self.type in TILED:
            size = self.contiguous()[2]
            starts = [i2 * self.nb[2] + i3 * self.nb[3] for i2 in range(self.ne[2]) for i3 in range(self.ne[3])]
        else:
            size = SIZE.get(self.type) or row_bytes(self.type, 32)
            ne = self.ne if self.type in SIZE else [self.ne[0] // 32, *self.ne[1:]]
            starts = [
                sum(i * nb for i, nb in zip(index, self.nb, strict=True))
                for index in itertools.product(*map(range, ne))
            ]
        return {self.offset + s + b for s in starts for b in range(size)}


def make(code: int, dst: Tensor, src: list[Tensor | None], params: dict[int, Any] | None = None, flags: int = 0) -> Any:
    op = ffi.new("tb_op *")
    op.code, op.flags, op.n_src = code, flags, len(src)
    dst.fill(op.dst)
    for i, t in enumerate(src):
        if t is None:
            op.src[i].buffer = NO_BUFFER
        else:
            t.fill(op.src[i])
    for i, v in (params or {}).items():
        if isinstance(v, float):
            ffi.cast("float *", op.params)[i] = v
        else:
            op.params[i] = v
    return op


def shape(op: Any) -> tuple[int, str]:
    why = ffi.new("char const **")
    status = lib.tb_op_check_shape(op, why)
    assert lib.tb_op_check_shape(op, ffi.NULL) == status
    return status, ffi.string(why[0]).decode()


def bounds(op: Any, extents: list[tuple[int, int, int]]) -> tuple[int, str]:
    """extents: (size, mapped, writable)"""
    why = ffi.new("char const **")
    c = ffi.new("tb_extent[]", [list(e) for e in extents])
    status = lib.tb_op_check_bounds(op, c, len(extents), why)
    assert lib.tb_op_check_bounds(op, c, len(extents), ffi.NULL) == status
    return status, ffi.string(why[0]).decode()


def accepted(code: int, dst: Tensor, src: list[Tensor | None], params: dict[int, Any] | None = None) -> None:
    op = make(code, dst, src, params)
    status, why = shape(op)
    assert status == lib.TB_OK, why
    assert why == ""


def refused(code: int, dst: Tensor, src: list[Tensor | None], params: dict[int, Any] | None = None) -> str:
    status, why = shape(make(code, dst, src, params))
    assert status in (lib.TB_E_UNSUPPORTED, lib.TB_E_SHAPE, lib.TB_E_PROTOCOL)
    assert why
    return why


# ---- what transformer graphs need


@pytest.mark.parametrize("w", WEIGHTS)
@pytest.mark.parametrize("m", [1, 16, 512])
def test_mul_mat(w: Type, m: int) -> None:
    op = lib.TB_OP_MUL_MAT
    accepted(op, Tensor(F32, 95, m), [Tensor(w, 64, 95), Tensor(F32, 64, m)])
    accepted(op, Tensor(F32, 32, m, 6, 4), [Tensor(w, 64, 32, 3, 2), Tensor(F32, 64, m, 6, 4)])  # broadcast
    accepted(op, Tensor(F32, 32, m, 2, 2), [Tensor(w, 64, 32), Tensor(F32, 64, 2, m, 2).permuted(0, 2, 1, 3)])
    if w not in TILED:
        accepted(op, Tensor(F32, 32, m, 4), [Tensor(w, 64, 4, 32).permuted(0, 2, 1, 3), Tensor(F32, 64, m, 4)])
    if w == F16:
        accepted(op, Tensor(F32, 32, m), [Tensor(w, 7, 32), Tensor(F16, 7, m)])
    else:
        refused(op, Tensor(F32, 32, m), [Tensor(w, 32, 32), Tensor(F16, 32, m)])
    refused(op, Tensor(F32, 95, m), [Tensor(w, 64, 95), Tensor(F32, 96, m)])
    refused(op, Tensor(F32, 96, m), [Tensor(w, 64, 95), Tensor(F32, 64, m)])
    refused(op, Tensor(F32, 32, m, 4), [Tensor(w, 64, 32, 3), Tensor(F32, 64, m, 4)])
    refused(op, Tensor(F16, 32, m), [Tensor(w, 64, 32), Tensor(F32, 64, m)])
    refused(op, Tensor(F32, 32, m), [Tensor(w, 64, 32)])
    refused(op, Tensor(F32, 32, m), [Tensor(w, 64, 32), Tensor(F32, m + 1, 64).permuted(1, 0, 2, 3)])
    if w not in SIZE:
        size = tile_bytes(w) if w in TILED else row_bytes(w, 32)
        refused(op, Tensor(F32, 32, m), [Tensor(w, 40, 32, nb=[size, size, size, size]), Tensor(F32, 40, m)])


def test_mul_mat_needs_aligned_tiles() -> None:
    x, y = Tensor(F32, 64, 1, 2), Tensor(F32, 32, 1, 2)
    matrix = 2 * tile_bytes(Type.Q4_0_COL)
    accepted(lib.TB_OP_MUL_MAT, y, [Tensor(Type.Q4_0_COL, 64, 32, 2, nb=[0, 0, matrix + 64, 0], offset=128), x])
    refused(lib.TB_OP_MUL_MAT, y, [Tensor(Type.Q4_0_COL, 64, 32, 2, nb=[0, 0, matrix + 32, 0]), x])
    refused(lib.TB_OP_MUL_MAT, y, [Tensor(Type.Q4_0_COL, 64, 32, 2, offset=32), x])
    one = tile_bytes(Type.MXFP4_COL)  # no multiple of 64: stacks and parts of such matrices are dense all the same
    y, x = Tensor(F32, 32, 8, 2), Tensor(F32, 32, 8, 2)
    accepted(lib.TB_OP_MUL_MAT, y, [Tensor(Type.MXFP4_COL, 32, 32, 2, nb=[0, 0, one, 0]), x])
    refused(lib.TB_OP_MUL_MAT, y, [Tensor(Type.MXFP4_COL, 32, 32, 2, nb=[0, 0, one + 16, 0]), x])
    accepted(lib.TB_OP_MUL_MAT, y, [Tensor(Type.MXFP4_COL, 32, 32, 2, nb=[0, 0, one, 0], offset=one), x])
    refused(lib.TB_OP_MUL_MAT, y, [Tensor(Type.MXFP4_COL, 32, 32, 2, nb=[0, 0, one, 0], offset=16), x])
    refused(lib.TB_OP_MUL_MAT, Tensor(F32, 32, offset=2), [Tensor(F32, 64, 32), Tensor(F32, 64)])


@pytest.mark.parametrize("dk", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("kv", [F16, F32])
def test_flash_attn(dk: int, heads: int, kv_heads: int, kv: Type) -> None:
    op, n, n_kv = lib.TB_OP_FLASH_ATTN, 5, 256
    for streams, dv in [(1, dk), (2, 64)]:
        q = Tensor(F32, dk, heads, n, streams).permuted(0, 2, 1, 3)
        k = Tensor(kv, dk, kv_heads, n_kv, streams).permuted(0, 2, 1, 3)
        v = Tensor(kv, dv, kv_heads, n_kv, streams).permuted(0, 2, 1, 3)
        dst = Tensor(F32, dv, heads, n, streams)
        for mask in [Tensor(F16, n_kv, n), Tensor(F16, n_kv, 64), Tensor(F16, n_kv, n, heads, streams)]:
            accepted(op, dst, [q, k, v, mask], {0: 0.1, 1: 8.0, 2: 50.0})
            accepted(op, dst, [q, k, v, mask, Tensor(F32, heads)], {0: 0.1})
        accepted(op, dst, [q, k, v], {0: 0.1})
        accepted(op, dst, [q, k, v, None, Tensor(F32, heads)], {0: 0.1})
        refused(op, dst, [q, k, v], {0: 0.1, 1: 8.0})  # ALiBi without a mask
        refused(op, dst, [q, k, v, Tensor(F16, n_kv, n - 1)], {0: 0.1})
        refused(op, dst, [q, k, v, Tensor(F16, n_kv - 1, n)], {0: 0.1})
        refused(op, dst, [q, k, v, Tensor(F16, n_kv, n, 3)], {0: 0.1})
        refused(op, dst, [q, k, v, Tensor(F32, n_kv, n)], {0: 0.1})
        refused(op, dst, [q, k, v, None, Tensor(F32, heads + 1)], {0: 0.1})
        refused(op, dst, [q, k, Tensor(kv, dv, n_kv + 1, kv_heads, streams)], {0: 0.1})
        refused(op, dst, [q, Tensor(kv, dk + 8, n_kv, kv_heads, streams), v], {0: 0.1})
        refused(op, Tensor(F32, dv, n, heads, streams), [q, k, v], {0: 0.1})
    bad = Tensor(kv, dk, n_kv, 3)
    refused(op, Tensor(F32, dk, 8, n), [Tensor(F32, dk, n, 8), bad, bad], {0: 0.1})


def test_flash_attn_head_sizes_have_a_limit() -> None:
    q, k = Tensor(F32, 1024, 5, 4), Tensor(F16, 1024, 256, 4)
    assert "head size" in refused(lib.TB_OP_FLASH_ATTN, Tensor(F32, 1024, 4, 5), [q, k, k])


@pytest.mark.parametrize("op", [lib.TB_OP_RMS_NORM, lib.TB_OP_SCALE])
def test_row_ops(op: int) -> None:
    x = Tensor(F32, 100, 3, 4, 5)
    accepted(op, x, [x])
    accepted(op, x, [Tensor(F32, 100, 3, 4, 5, nb=[4, 1024, 4096, 65536])])
    accepted(op, Tensor(F32, 64, 8, 3), [Tensor(F32, 64, 3, 8).permuted(0, 2, 1, 3)])
    refused(op, Tensor(F32, 100, 3, 4), [x])
    refused(op, Tensor(I32, 100), [Tensor(I32, 100)])
    refused(op, x, [])
    refused(op, x, [x, x])


@pytest.mark.parametrize("op", [lib.TB_OP_MUL, lib.TB_OP_ADD])
def test_binary(op: int) -> None:
    a = Tensor(F32, 12, 6, 4, 2)
    for b in [a, Tensor(F32, 12), Tensor(F32, 1), Tensor(F32, 4, 3, 2, 1), Tensor(F32, 1, 6), Tensor(F32, 12, 1, 4)]:
        accepted(op, a, [a, b])
    accepted(op, a, [a, Tensor(F32, 6, 12, 4, 2).permuted(1, 0, 2, 3)])
    accepted(op, Tensor(F16, 12), [Tensor(F16, 12), Tensor(F32, 12)])
    refused(op, a, [a, Tensor(F32, 5)])
    refused(op, a, [a, Tensor(F32, 24)])
    refused(op, Tensor(F32, 12), [a, a])
    refused(op, a, [a, Tensor(F32, 0)])
    refused(op, a, [a])


@pytest.mark.parametrize("type", [F32, F16])
@pytest.mark.parametrize("mode", [0, 2])
def test_rope(type: Type, mode: int) -> None:
    op, x, pos = lib.TB_OP_ROPE, Tensor(type, 128, 8, 5), Tensor(I32, 5)
    for n_dims, offset in [(128, 0), (64, 0), (64, 64), (0, 0)]:
        accepted(op, x, [x, pos], {1: n_dims, 2: mode, 15: offset})
    accepted(op, x, [x, pos, Tensor(F32, 64)], {1: 128, 2: mode})
    accepted(op, x, [Tensor(type, 128, 8, 5, nb=[SIZE[type], 1024, 16384, 1 << 20]), pos], {1: 128, 2: mode})
    for params in [{1: 130}, {1: 127}, {1: -2}, {1: 128, 15: 2}, {1: 64, 15: -2}, {1: 2**31 - 2, 15: 2**31 - 2}]:
        refused(op, x, [x, pos], {2: mode, **params})
    refused(op, x, [x, Tensor(I32, 6)], {1: 128, 2: mode})
    refused(op, x, [x, Tensor(F32, 5)], {1: 128, 2: mode})
    refused(op, x, [x, pos, Tensor(F32, 63)], {1: 128, 2: mode})
    refused(op, Tensor(F16 if type == F32 else F32, 128, 8, 5), [x, pos], {1: 128, 2: mode})
    refused(op, x, [x], {1: 128, 2: mode})


@pytest.mark.parametrize("mode", [1, 4, 10, 16, 32, -1])
def test_rope_modes_that_are_none_are_refused(mode: int) -> None:
    x = Tensor(F32, 128, 8, 5)
    assert "mode" in refused(lib.TB_OP_ROPE, x, [x, Tensor(I32, 5)], {1: 128, 2: mode})


@pytest.mark.parametrize("dst", [F32, F16, BF16, Q8_0, Q4_0])
@pytest.mark.parametrize("index", [I64, I32])
def test_set_rows(dst: Type, index: Type) -> None:
    op = lib.TB_OP_SET_ROWS
    accepted(op, Tensor(dst, 64, 512), [Tensor(F32, 64, 5), Tensor(index, 5)])
    accepted(op, Tensor(dst, 64, 512, 6, 4), [Tensor(F32, 64, 5, 6, 4), Tensor(index, 5, 3, 2)])
    refused(op, Tensor(dst, 64, 512), [Tensor(F32, 32, 5), Tensor(index, 5)])
    refused(op, Tensor(dst, 64, 512), [Tensor(F32, 64, 5), Tensor(index, 4)])
    refused(op, Tensor(dst, 64, 512), [Tensor(F32, 64, 5, 2), Tensor(index, 5)])
    refused(op, Tensor(dst, 64, 512, 4), [Tensor(F32, 64, 5, 4), Tensor(index, 5, 3)])
    refused(op, Tensor(dst, 64, 512), [Tensor(F32, 64, 5), Tensor(F32, 5)])
    refused(op, Tensor(Type.Q8_0_COL, 64, 512), [Tensor(F32, 64, 5), Tensor(index, 5)])


@pytest.mark.parametrize("kind", range(7))
def test_glu(kind: int) -> None:
    op = lib.TB_OP_GLU
    accepted(op, Tensor(F32, 50, 3), [Tensor(F32, 100, 3)], {0: kind, 1: 1})
    accepted(op, Tensor(F32, 50, 3), [Tensor(F32, 50, 3), Tensor(F32, 50, 3)], {0: kind})
    accepted(op, Tensor(F16, 50, 3), [Tensor(F16, 50, 3, nb=[2, 512, 2048, 2048]), Tensor(F16, 50, 3)], {0: kind})
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 50, 3)], {0: kind})
    accepted(op, Tensor(F32, 50, 3), [Tensor(F32, 101, 3)], {0: kind})  # ggml drops the odd one
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 102, 3)], {0: kind})
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 50, 3), Tensor(F32, 50, 2)], {0: kind})
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 50, 3), Tensor(F16, 50, 3)], {0: kind})
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 100, 3)], {0: -1 - kind})
    refused(op, Tensor(F32, 50, 3), [Tensor(F32, 100, 3)], {0: 100 + kind})


def test_soft_max() -> None:
    op, x = lib.TB_OP_SOFT_MAX, Tensor(F32, 77, 5, 8, 2)
    accepted(op, x, [x], {0: 1.0})
    for type in (F32, F16):
        for mask in [Tensor(type, 77, 5), Tensor(type, 77, 8, 4, 2), Tensor(type, 77, 5, 1, 2)]:
            accepted(op, x, [x, mask], {0: 1.0, 1: 8.0})
        refused(op, x, [x, Tensor(type, 77, 4)])
        refused(op, x, [x, Tensor(type, 78, 5)])
        refused(op, x, [x, Tensor(type, 77, 5, 3)])
    accepted(op, x, [x, None, Tensor(F32, 8)])
    refused(op, x, [x, None, Tensor(F32, 5)])
    refused(op, x, [x], {1: 8.0})


@pytest.mark.parametrize("type", [F32, F16, BF16, Q4_0, Q8_0, IQ4_NL])
def test_get_rows(type: Type) -> None:
    op = lib.TB_OP_GET_ROWS
    accepted(op, Tensor(F32, 64, 3), [Tensor(type, 64, 100), Tensor(I32, 3)])
    accepted(op, Tensor(F32, 64, 3, 4, 5), [Tensor(type, 64, 100, 4, 5), Tensor(I32, 3, 4, 5)])
    accepted(op, Tensor(I32, 64, 3), [Tensor(I32, 64, 100), Tensor(I32, 3)])
    refused(op, Tensor(F32, 64, 3), [Tensor(I32, 64, 100), Tensor(I32, 3)])
    refused(op, Tensor(F32, 64, 4), [Tensor(type, 64, 100), Tensor(I32, 3)])
    refused(op, Tensor(F32, 64, 3), [Tensor(type, 64, 100, 2), Tensor(I32, 3)])
    refused(op, Tensor(F32, 64, 3), [Tensor(type, 64, 100), Tensor(I64, 3)])
    refused(op, Tensor(F16, 64, 3), [Tensor(type, 64, 100), Tensor(I32, 3)])


def test_cpy() -> None:
    op = lib.TB_OP_CPY
    for a, b in itertools.product([F32, F16, BF16], repeat=2):
        accepted(op, Tensor(b, 6, 20), [Tensor(a, 5, 4, 3, 2).permuted(2, 0, 3, 1)])
        accepted(op, Tensor(b, 5, 4).permuted(1, 0, 2, 3), [Tensor(a, 20)])
        refused(op, Tensor(b, 6, 20), [Tensor(a, 5, 4, 3)])
    accepted(op, Tensor(I32, 7), [Tensor(I32, 7)])
    accepted(op, Tensor(F32, 7), [Tensor(I32, 7)])
    refused(op, Tensor(F16, 7), [Tensor(I32, 7)])
    for q in (Q8_0, Q4_0):
        accepted(op, Tensor(q, 64, 3), [Tensor(F32, 64, 3)])
        refused(op, Tensor(q, 64, 3), [Tensor(I32, 64, 3)])
    refused(op, Tensor(Type.Q8_0_COL, 64, 32), [Tensor(F32, 64, 32)])


@pytest.mark.parametrize("code", [lib.TB_OP_COUNT, 255, 2**32 - 1])
def test_unknown_ops(code: int) -> None:
    x = Tensor(F32, 4)
    assert "no such op" in refused(code, x, [x])
    assert bounds(make(code, x, [x]), [(64, 1, 1)])[0] == lib.TB_E_UNSUPPORTED
    assert ffi.string(lib.tb_op_name(code)) == b"unknown"


def test_names_flags_and_nop() -> None:
    names = [ffi.string(lib.tb_op_name(i)).decode() for i in range(lib.TB_OP_COUNT)]
    for name in names:
        assert getattr(lib, "TB_OP_" + name) == names.index(name)
    x = Tensor(F32, 4)
    nop = make(lib.TB_OP_NOP, Tensor(F32, 0, buffer=77), [])
    assert shape(nop)[0] == bounds(nop, [])[0] == lib.TB_OK
    for code in OPS:
        assert shape(make(code, x, [x, x], flags=0x80))[1] == "flags"
        op = make(code, x, [x])
        op.n_src = lib.TB_MAX_SRC + 1
        assert shape(op)[0] == lib.TB_E_PROTOCOL


def test_attention_is_in_fp16_or_has_exact_exponents() -> None:
    q, k, out = Tensor(F32, 64, 5, 4), Tensor(F16, 64, 256, 2), Tensor(F32, 64, 4, 5)
    fp16, exact, alike = lib.TB_FLAG_FP16, lib.TB_FLAG_EXACT_EXP, lib.TB_FLAG_DETERMINISTIC
    good = [(flags, "") for flags in (0, fp16, exact, alike)]
    for flags, found in (*good, *((bad, "flags") for bad in (fp16 | exact, exact | alike, 4))):
        op = make(lib.TB_OP_FLASH_ATTN, out, [q, k, k], flags=flags)
        assert shape(op) == (lib.TB_E_UNSUPPORTED if found else lib.TB_OK, found)


def test_an_empty_result_needs_nothing() -> None:
    """No output rows wanted: the op passes, and its bounds hold wherever it lies inside its buffer."""
    dst, x, rows = Tensor(F32, 64, 0), Tensor(F32, 64, 9), Tensor(I32, 0)
    accepted(lib.TB_OP_GET_ROWS, dst, [x, rows])
    op = make(lib.TB_OP_GET_ROWS, dst, [x, rows])
    assert bounds(op, [(64 * 9 * 4, 1, 1)])[0] == lib.TB_OK
    accepted(lib.TB_OP_RMS_NORM, dst, [dst])
    accepted(lib.TB_OP_MUL_MAT, dst, [Tensor(Q4_0, 32, 64), Tensor(F32, 32, 0)])
    refused(lib.TB_OP_MUL_MAT, Tensor(F32, 64, 2), [Tensor(F32, 0, 64), Tensor(F32, 0, 2)])


# ---- bounds


small = st.integers(1, 5)
types = st.sampled_from([F32, F16, BF16, I32, I64, Q4_0, Q8_0, IQ4_NL, *TILED])


@st.composite
def tensors(draw: st.DrawFn, max_offset: int = 300) -> Tensor:
    type = draw(types)
    ne = [draw(small) for _ in range(4)]
    if type not in SIZE:
        ne[0] *= 32
    if type in TILED:
        ne[1] = draw(st.sampled_from([1, 31, 32, 33, 64]))
    t = Tensor(type, *ne)
    if draw(st.booleans()):
        t.nb = [draw(st.integers(0, 64)) * (SIZE.get(type) or 2) for _ in range(4)]
    t.offset = draw(st.integers(0, max_offset))
    return t


def c_tensor(t: Tensor) -> Any:
    c = ffi.new("tb_tensor *")
    t.fill(c)
    return c


@settings(max_examples=300, deadline=None)
@given(tensors())
def test_span_is_the_last_byte_touched(t: Tensor) -> None:
    empty = ffi.new("int *")
    assert lib.tb_tensor_span(c_tensor(t), empty) == max(t.bytes()) + 1 - t.offset
    assert empty[0] == 0
    t.ne[2] = 0
    assert lib.tb_tensor_span(c_tensor(t), empty) == 0
    assert empty[0] == 1


@settings(max_examples=200, deadline=None)
@given(tensors(), st.integers(-2, 2), st.integers(0, 3), st.booleans())
def test_operands_lie_inside_their_buffers(t: Tensor, slack: int, buffer: int, writable: bool) -> None:
    """dst in buffer 1, the operand under test in another: accepted exactly when every byte is inside."""
    t.buffer = buffer
    dst = Tensor(F32, 4, buffer=1)
    size = max(t.bytes()) + 1 + slack
    extents = [(size, 1, int(writable)), (16, 1, 1), (size, 0, 1)]
    status, why = bounds(make(lib.TB_OP_CPY, dst, [t]), extents)
    if buffer >= 2:  # not mapped, or beyond the table
        assert status == lib.TB_E_BUFFER
    elif buffer == 1:
        assert (status == lib.TB_OK) <= (max(t.bytes()) < 16)
    else:
        assert (status == lib.TB_OK) == (slack >= 0), why
        # as the result: it must be writable as well
        status, _ = bounds(make(lib.TB_OP_CPY, t, [dst]), extents)
        expected = lib.TB_E_BUFFER if not writable else lib.TB_OK if slack >= 0 else lib.TB_E_BOUNDS
        assert status == expected


@pytest.mark.parametrize(("ne", "nb"), [([2**32 - 1, 2**32 - 1, 2, 1], None), ([4, 2, 1, 1], [4, 2**63, 0, 0])])
def test_overflow_is_no_way_in(ne: list[int], nb: list[int] | None) -> None:
    t = Tensor(F32, 4)
    t.ne, t.nb = ne, nb or [4, 2**62, 2**63, 2**63]
    empty = ffi.new("int *")
    assert lib.tb_tensor_span(c_tensor(t), empty) in (0, 2**63 + 16)
    assert shape(make(lib.TB_OP_SCALE, t, [t]))[0] == lib.TB_E_SHAPE
    assert bounds(make(lib.TB_OP_SCALE, t, [t]), [(2**40, 1, 1)])[0] != lib.TB_OK
    x = Tensor(F32, 4, offset=2**64 - 8)
    assert bounds(make(lib.TB_OP_SCALE, x, [x]), [(2**63, 1, 1)])[0] == lib.TB_E_BOUNDS


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([lib.TB_OP_MUL_MAT, lib.TB_OP_ADD, lib.TB_OP_RMS_NORM, lib.TB_OP_GET_ROWS, lib.TB_OP_CPY]),
    st.integers(0, 12),
    st.integers(0, 12),
    st.booleans(),
)
@example(lib.TB_OP_ADD, 3, 3, True)
@example(lib.TB_OP_MUL_MAT, 3, 3, True)
def test_overlap(code: int, at: int, dst_at: int, same_buffer: bool) -> None:
    """Sure overlaps of dst and an operand are refused, but for exact aliases of element-wise ops."""
    n = 4
    src = Tensor(F32, n, offset=4 * at)
    dst = Tensor(F32, n, offset=4 * dst_at, buffer=0 if same_buffer else 1)
    other = Tensor(F32, 1, buffer=2)
    status, why = bounds(make(code, dst, [src, other]), [(256, 1, 1)] * 3)
    shared = same_buffer and bool(src.bytes() & dst.bytes())
    in_place = code in (lib.TB_OP_ADD, lib.TB_OP_RMS_NORM, lib.TB_OP_CPY) and at == dst_at
    assert (status == lib.TB_OK) == (not shared or in_place), why


def test_interleaved_views_do_not_overlap() -> None:
    """Two column ranges of one matrix: spans cross, bytes do not."""
    left = Tensor(F32, 4, 8, nb=[4, 32, 256, 256])
    right = Tensor(F32, 4, 8, nb=[4, 32, 256, 256], offset=16)
    assert not left.bytes() & right.bytes()
    assert bounds(make(lib.TB_OP_CPY, left, [right]), [(256, 1, 1)])[0] == lib.TB_OK


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(1, 300), st.sampled_from([0, 1, 2]))
def test_elements_on_top_of_each_other(axis: int, size: int, stride: int) -> None:
    """No element of dst shares bytes with another; those of an operand may, within reason: a buffer of a few bytes
    must not be work for hours."""
    ne = [1, 1, 1, 1]
    ne[axis] = size
    nb = [4, 4, 4, 4]
    nb[axis] = 4 * stride
    piled = Tensor(F32, *ne, nb=nb)
    flat = Tensor(F32, *ne)
    shared = stride == 0 and size > 1
    assert len(piled.bytes()) == (4 if shared else 4 * size)
    assert (shape(make(lib.TB_OP_SCALE, piled, [flat]))[0] == lib.TB_OK) == (not shared)
    assert (shape(make(lib.TB_OP_SCALE, flat, [piled]))[0] == lib.TB_OK) == (not shared or size <= 256)


@pytest.mark.parametrize(("dimensions", "stride"), [(1, 0), (2, 0), (3, 0), (2, 4), (3, 4)])
def test_no_op_runs_for_ever_on_a_small_buffer(dimensions: int, stride: int) -> None:
    """2^35 elements or more in a few bytes, by strides of 0 or by strides that are all alike."""
    many = [2 ** min(31, 36 // dimensions)] * dimensions
    piled = Tensor(F32, 16, *many, nb=[4, stride, stride, stride])
    for op in (
        make(lib.TB_OP_SCALE, piled, [piled]),
        make(lib.TB_OP_SUM, Tensor(F32, 1), [piled]),
        make(lib.TB_OP_CPY, piled, [piled]),
    ):
        assert shape(op) == (lib.TB_E_SHAPE, "elements overlap")


# ---- fuzz


numbers32 = st.one_of(st.integers(0, 70), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
numbers64 = st.one_of(
    st.integers(0, 5000), st.sampled_from([2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 4]), st.integers(0, 2**64 - 1)
)
wild = st.tuples(numbers32, st.integers(0, 14), numbers64, st.tuples(*[numbers32] * 4), st.tuples(*[numbers64] * 4))


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, lib.TB_OP_COUNT + 1),
    st.integers(0, 6),
    wild,
    st.lists(wild, min_size=5, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16),
)
def test_wild_descriptors_do_no_harm(code: int, n_src: int, dst: Any, src: list[Any], params: list[int]) -> None:
    op = ffi.new("tb_op *")
    op.code, op.n_src, op.params = code, n_src, params
    for c, (buffer, type, offset, ne, nb) in [(op.dst, dst), *((op.src[i], s) for i, s in enumerate(src))]:
        c.buffer, c.type, c.offset, c.ne, c.nb = buffer % 8, type, offset, ne, nb
    status, why = shape(op)
    assert (status == lib.TB_OK) == (why == "")
    status, why = bounds(op, [(2**i, 1, 1) for i in range(8)])
    assert (status == lib.TB_OK) == (why == "")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(OPS)), tensors(), st.lists(tensors(), min_size=1, max_size=3), st.integers(0, 2**14))
def test_what_passes_both_checks_touches_only_its_buffer(code: int, dst: Tensor, src: list[Tensor], size: int) -> None:
    op = make(code, dst, list(src), {1: 2})
    op.n_src = min(op.n_src, 3)
    status, _ = bounds(op, [(size, 1, 1)])
    inside = all(max(t.bytes()) < size for t in (dst, *src))
    if status == lib.TB_OK:
        assert inside
    elif not inside:
        assert status == lib.TB_E_BOUNDS
