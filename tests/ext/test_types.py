"""The table of types agrees with ggml, with the rules of the ops and with the layout, and nothing states it again."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tilebeam._ext import (
    Type,
    column_type,
    ffi,
    has_file_form,
    has_quantizer,
    is_tiled,
    layout_version,
    lib,
    row_bytes,
    source_type,
    tile_bytes,
    tile_type,
    tiled_bytes,
)
from tilebeam.gguf import ggml_values
from tilebeam.gguf.weights import TB_TYPE

ROOT = Path(__file__).resolve().parents[2]
PLAIN = [t for t in Type if not is_tiled(t)]
TILED = [t for t in Type if is_tiled(t)]
SOURCES = ("backend", "ggml_ext", "gguf_tools", "python", "bench", "tests/kits", "tests/hexagon", "tests/native")


def test_python_names_every_type() -> None:
    names = dict(ffi.typeof("enum tb_type").relements)
    assert names.pop("TB_TYPE_COUNT") == len(Type) == lib.TB_TYPE_COUNT
    assert names == {f"TB_{t.name}": t for t in Type}
    assert [t.label for t in Type] == [t.name.lower() for t in Type]
    assert ffi.string(lib.tb_status_name(-1)) == b"unknown status"


@pytest.mark.parametrize("type", PLAIN)
def test_a_plain_type_is_ggmls(type: Type) -> None:
    size = (lib.tb_type_block(type), lib.tb_type_size(type))
    if type.name in gguf.GGMLQuantizationType.__members__:
        ggml = gguf.GGMLQuantizationType[type.name]
        assert type.ggml == ggml
        assert size == gguf.GGML_QUANT_SIZES[ggml]
        assert (ggml in TB_TYPE) == type.is_multiplied
    else:  # of gguf 0.19; ggml's own table has it
        traits = ggml_values._library().ggml_get_type_traits(type.ggml).contents
        assert (type, traits.type_name, (traits.block, traits.type_size)) == (Type.Q2_0, b"q2_0", size)
    # what becomes tiles has tiles by column; those that floats are quantized to, in both groupings
    assert (column_type(type) is not None) == type.is_in_tiles
    assert (tile_type(type) is not None) == has_quantizer(type)


@pytest.mark.parametrize("type", TILED)
def test_a_tiled_type_has_the_bytes_of_its_source(type: Type) -> None:
    source = source_type(type)
    assert type in (column_type(source), tile_type(source))
    k = lib.tb_tile_k(type)
    assert (tile_bytes(type) * k == 32 * 32 * row_bytes(source, k)) == has_file_form(type)
    assert tile_bytes(type) * k >= 32 * 32 * row_bytes(source, k)
    if has_quantizer(source):
        assert tile_bytes(type) == lib.tb_type_of(type).quant_bytes + 32 * 2
        assert layout_version(type) == 1
    else:
        assert layout_version(type) == 2
    assert type.ggml == source.ggml
    assert type.is_in_tiles
    assert type.is_multiplied
    assert lib.tb_type_size(type) == lib.tb_type_block(type) == 0


@pytest.mark.parametrize("type", list(Type))
def test_products_take_the_weights_that_the_table_says(type: Type) -> None:
    op = ffi.new("tb_op *")
    op.code, op.n_src = lib.TB_OP_MUL_MAT, 2
    block, k = lib.tb_type_size(type), max(32, lib.tb_tile_k(type), lib.tb_type_block(type))
    row = 0 if is_tiled(type) else row_bytes(type, k)
    matrix = tiled_bytes(type, k, 32) if is_tiled(type) else 32 * row
    op.src[0] = {"type": type, "ne": [k, 32, 1, 1], "nb": [block, row, matrix, matrix]}
    for t, n in ((op.src[1], k), (op.dst, 32)):
        t.type, t.ne, t.nb = Type.F32, [n, 32, 1, 1], [4, 4 * n, 128 * n, 128 * n]
    for i in range(2, lib.TB_MAX_SRC):
        op.src[i].buffer = lib.TB_NO_BUFFER
    assert (lib.tb_op_check_shape(op, ffi.NULL) == lib.TB_OK) == type.is_multiplied


def test_unknown_types_have_nothing() -> None:
    for unknown in (lib.TB_TYPE_COUNT, 255, 2**32 - 1):
        assert lib.tb_type_of(unknown) == ffi.NULL
        assert lib.tb_type_size(unknown) == lib.tb_type_block(unknown) == lib.tb_tile_bytes(unknown) == 0
        assert ffi.string(lib.tb_type_name(unknown)) == b"unknown"
        assert not lib.tb_type_is_tiled(unknown)
        for of in (lib.tb_tiled_source, lib.tb_tiled_column, lib.tb_tiled_tile):
            assert of(unknown) == lib.TB_TYPE_COUNT
