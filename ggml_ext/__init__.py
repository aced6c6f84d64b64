"""The contract in Python: tile layouts, op descriptors and protocol, by cffi from the same C code the backend uses.

``ffi`` and ``lib`` are the raw view. The functions below take and give numpy arrays; the C code runs without the GIL.
A weight matrix has K inputs and N outputs: ggml's ``ne = [K, N]``, numpy's shape ``(N, K)``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ._library import native_file, open_library

__all__ = [
    "GROUPINGS",
    "LAYOUT_VERSION",
    "TILE",
    "Type",
    "column_type",
    "dequantize",
    "ffi",
    "has_file_form",
    "has_quantizer",
    "is_tiled",
    "layout_version",
    "lib",
    "native_file",
    "pack",
    "packed_bytes",
    "quantize",
    "row_bytes",
    "source_type",
    "tile_bytes",
    "tile_type",
    "tiled_bytes",
    "unpack",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ffi: Any
lib: Any
ffi, lib = open_library()

LAYOUT_VERSION: int = lib.TB_LAYOUT_VERSION
TILE: int = lib.TB_TILE_N
# How the scales of a tile can be grouped, by name.
GROUPINGS: dict[str, int] = {"column": lib.TB_COLUMN, "tile": lib.TB_TILE}


class Type(IntEnum):
    """``enum tb_type``: element types, and what a repacked file's metadata calls them. What is known of each is in the
    table of types.h."""

    F32 = lib.TB_F32
    F16 = lib.TB_F16
    BF16 = lib.TB_BF16
    I32 = lib.TB_I32
    I64 = lib.TB_I64
    Q4_0 = lib.TB_Q4_0
    Q8_0 = lib.TB_Q8_0
    IQ4_NL = lib.TB_IQ4_NL
    Q4_0_COL = lib.TB_Q4_0_COL
    Q8_0_COL = lib.TB_Q8_0_COL
    IQ4_NL_COL = lib.TB_IQ4_NL_COL
    Q4_0_TILE = lib.TB_Q4_0_TILE
    Q8_0_TILE = lib.TB_Q8_0_TILE
    IQ4_NL_TILE = lib.TB_IQ4_NL_TILE
    Q4_K = lib.TB_Q4_K
    Q5_K = lib.TB_Q5_K
    Q6_K = lib.TB_Q6_K
    Q4_K_COL = lib.TB_Q4_K_COL
    Q5_K_COL = lib.TB_Q5_K_COL
    Q6_K_COL = lib.TB_Q6_K_COL
    Q2_K = lib.TB_Q2_K
    Q3_K = lib.TB_Q3_K
    Q2_K_COL = lib.TB_Q2_K_COL
    Q3_K_COL = lib.TB_Q3_K_COL
    IQ4_XS = lib.TB_IQ4_XS
    IQ4_XS_COL = lib.TB_IQ4_XS_COL
    TQ2_0 = lib.TB_TQ2_0
    TQ2_0_COL = lib.TB_TQ2_0_COL
    TQ1_0 = lib.TB_TQ1_0
    TQ1_0_COL = lib.TB_TQ1_0_COL
    Q5_0 = lib.TB_Q5_0
    Q4_1 = lib.TB_Q4_1
    Q5_1 = lib.TB_Q5_1
    Q5_0_COL = lib.TB_Q5_0_COL
    Q4_1_COL = lib.TB_Q4_1_COL
    Q5_1_COL = lib.TB_Q5_1_COL
    MXFP4 = lib.TB_MXFP4
    MXFP4_COL = lib.TB_MXFP4_COL
    IQ2_XXS = lib.TB_IQ2_XXS
    IQ2_XS = lib.TB_IQ2_XS
    IQ2_S = lib.TB_IQ2_S
    IQ3_XXS = lib.TB_IQ3_XXS
    IQ3_S = lib.TB_IQ3_S
    IQ1_S = lib.TB_IQ1_S
    IQ1_M = lib.TB_IQ1_M
    IQ2_XXS_COL = lib.TB_IQ2_XXS_COL
    IQ2_XS_COL = lib.TB_IQ2_XS_COL
    IQ2_S_COL = lib.TB_IQ2_S_COL
    IQ3_XXS_COL = lib.TB_IQ3_XXS_COL
    IQ3_S_COL = lib.TB_IQ3_S_COL
    IQ1_S_COL = lib.TB_IQ1_S_COL
    IQ1_M_COL = lib.TB_IQ1_M_COL
    Q1_0 = lib.TB_Q1_0
    Q2_0 = lib.TB_Q2_0
    Q1_0_COL = lib.TB_Q1_0_COL
    Q2_0_COL = lib.TB_Q2_0_COL
    NVFP4 = lib.TB_NVFP4
    NVFP4_COL = lib.TB_NVFP4_COL

    @property
    def _info(self) -> Any:
        return lib.tb_type_of(self)

    @property
    def label(self) -> str:
        """Lower-case name as the C library has it, for people; of a plain type ggml's."""
        return str(ffi.string(self._info.name).decode())

    @property
    def ggml(self) -> int:
        """ggml's number of the type; a tiled type has that of its source."""
        return int(self._info.ggml)

    @property
    def is_multiplied(self) -> bool:
        """Return whether the device multiplies by weights of the type."""
        return bool(self._info.weights != lib.TB_NEVER)

    @property
    def is_in_tiles(self) -> bool:
        """Return whether the device has weights of the type in tiles: tiled, or made into tiles while a model loads."""
        return bool(self._info.weights == lib.TB_IN_TILES)


def is_tiled(type: Type) -> bool:
    """Return whether this is one of the tiled types."""
    return bool(lib.tb_type_is_tiled(type))


def column_type(ggml_type: Type) -> Type | None:
    """Return tiled type, ``column`` grouping, of plain ggml blocks; None if there is none."""
    found = int(lib.tb_tiled_column(ggml_type))
    return Type(found) if found < lib.TB_TYPE_COUNT else None


def tile_type(ggml_type: Type) -> Type | None:
    """Return tiled type, ``tile`` grouping, of plain ggml blocks; None if there is none."""
    found = int(lib.tb_tiled_tile(ggml_type))
    return Type(found) if found < lib.TB_TYPE_COUNT else None


def source_type(tiled: Type) -> Type:
    """Return the plain ggml type of a tiled type, of as many bytes per element. Raises ValueError for other types."""
    found = int(lib.tb_tiled_source(tiled))
    if found >= lib.TB_TYPE_COUNT:
        raise ValueError(f"{Type(tiled).label} is not a tiled type")
    return Type(found)


def tile_bytes(tiled: Type) -> int:
    """Return the bytes of one 32 x 32 tile with its scales."""
    source_type(tiled)
    return int(lib.tb_tile_bytes(tiled))


def has_file_form(tiled: Type) -> bool:
    """Return whether tiles have the bytes of their blocks, as a repacked file needs it; those of IQ1 to IQ3, Q1_0 and
    Q2_0 have more, and are made while a model loads."""
    plain = TILE * row_bytes(source_type(tiled), int(lib.tb_tile_k(tiled)))
    return packed_bytes(source_type(tiled), plain) == plain


def layout_version(tiled: Type) -> int:
    """Return the first layout version that has this tiled type: 1 for Q4_0, Q8_0 and IQ4_NL, 2 for others."""
    return 1 if tile_type(source_type(tiled)) is not None else 2


def tiled_bytes(tiled: Type, k: int, n: int) -> int:
    """Return a tiled matrix's bytes, N rounded up to whole tiles. Raises ValueError if K is not a multiple of 32."""
    source_type(tiled)
    size = int(lib.tb_tiled_bytes(tiled, k, n)) if 0 < k < 1 << 32 and 0 < n < 1 << 32 else 0
    if size == 0:
        raise ValueError(
            f"no {Type(tiled).label} matrix has K = {k} and N = {n}: K must be a multiple of {lib.tb_tile_k(tiled)}"
        )
    return size


def row_bytes(ggml_type: Type, k: int) -> int:
    """Return the bytes of one row of K elements of a plain type. Raises ValueError if K is not whole blocks."""
    block = int(lib.tb_type_block(ggml_type))
    if block == 0 or k <= 0 or k % block != 0:
        raise ValueError(f"no row of {k} elements of type {Type(ggml_type).label}")
    return k // block * int(lib.tb_type_size(ggml_type))


def packed_bytes(ggml_type: Type, nbytes: int) -> int:
    """Return the bytes of the tiles that `nbytes` of plain blocks, in whole panels, become while a model loads; as many
    of a type that stays as it is."""
    tiled = column_type(ggml_type)
    if tiled is None:
        return nbytes
    k = int(lib.tb_tile_k(tiled))
    return nbytes * tile_bytes(tiled) * k // (TILE * TILE * row_bytes(ggml_type, k))


def _check(status: int) -> None:
    if status != lib.TB_OK:
        raise ValueError(f"tile layout: {ffi.string(lib.tb_status_name(status)).decode()}")


def _flat(a: npt.NDArray[Any], dtype: type[np.generic], size: int, what: str) -> Any:
    if a.dtype != dtype or not a.flags.c_contiguous or a.size != size:
        raise ValueError(f"{what}: {size} contiguous {np.dtype(dtype).name} needed, got {a.size} of {a.dtype}")
    return ffi.from_buffer(a)


def _output(out: Bytes | None, size: int) -> Bytes:
    if out is None:
        return np.empty(size, np.uint8)
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def pack(tiled: Type, blocks: Bytes, k: int, n: int, out: Bytes | None = None) -> Bytes:
    """Pack plain ggml blocks (N rows, contiguous) into tiles of a ``column`` type.

    Args:
        tiled: of ``column`` grouping.
        blocks: uint8, ``n * row_bytes(source_type(tiled), k)`` long.
        out: where to write, ``tiled_bytes(tiled, k, n)`` long; a new array if None.

    Returns:
        The tiles, uint8, flat.

    Raises:
        ValueError: sizes do not fit, or the type has no lossless packing.
    """
    size = tiled_bytes(tiled, k, n)
    source = _flat(blocks, np.uint8, n * row_bytes(source_type(tiled), k), "blocks")
    out = _output(out, size)
    _check(lib.tb_pack(tiled, k, n, source, _flat(out, np.uint8, size, "out")))
    return out


def unpack(tiled: Type, tiles: Bytes, k: int, n: int, out: Bytes | None = None) -> Bytes:
    """Undo :func:`pack`, bit for bit: uint8, ``n * row_bytes(source_type(tiled), k)`` long."""
    size = n * row_bytes(source_type(tiled), k)
    source = _flat(tiles, np.uint8, tiled_bytes(tiled, k, n), "tiles")
    out = _output(out, size)
    _check(lib.tb_unpack(tiled, k, n, source, _flat(out, np.uint8, size, "out")))
    return out


def dequantize(type: Type, data: Bytes, k: int, n: int) -> Floats:
    """Return the float32 values, shape (N, K), of a tiled matrix or of plain rows: floats, or blocks that become tiles.

    Raises:
        ValueError: sizes do not fit, or there are no values in that type.
    """
    out = np.empty((n, k), np.float32)
    to = ffi.cast("float *", ffi.from_buffer(out))
    if not is_tiled(type):
        _check(lib.tb_dequantize_row(type, n * k, _flat(data, np.uint8, n * row_bytes(type, k), "data"), to))
        return out
    panel = tiled_bytes(type, k, TILE)
    source = _flat(data, np.uint8, tiled_bytes(type, k, n), "data")
    for row in range(0, n, TILE):
        _check(lib.tb_dequantize_panel(type, k, min(TILE, n - row), source + row // TILE * panel, to + row * k))
    return out


def has_quantizer(type: Type) -> bool:
    """Return whether floats can be quantized to a type, plain or tiled; blocks of other types become tiles as they
    are."""
    return bool(lib.tb_has_quantizer(type))


def quantize(
    tiled: Type,
    values: Floats,
    out: Bytes | None = None,
    *,
    search: int = 0,
    sums: npt.NDArray[np.float64] | None = None,
) -> Bytes:
    """Quantize float32 values of shape (N, K) to tiles: rounded as ggml's reference does, or with searched scales.

    Args:
        search: 1 chooses each scale for the smallest sum of squared errors (quantize.h has the other values).
        sums: float64 (2,), added to: ``struct tb_quantize_error``.

    Raises:
        ValueError: K is not a multiple of 32, a value is not finite or too large for an FP16 scale, or nothing is
            quantized to this type.
    """
    if not has_quantizer(tiled):
        known = ", ".join(t.label for t in Type if has_quantizer(t) and not is_tiled(t))
        raise ValueError(f"{tiled.label}: floats are quantized to tiles of these types only: {known}")
    n, k = values.shape
    size = tiled_bytes(tiled, k, n)
    source = ffi.cast("float *", _flat(values, np.float32, n * k, "values"))
    e = ffi.NULL if sums is None else ffi.cast("struct tb_quantize_error *", _flat(sums, np.float64, 2, "sums"))
    out = _output(out, size)
    status = lib.tb_quantize(tiled, k, n, source, search, _flat(out, np.uint8, size, "out"), e)
    if status == lib.TB_E_UNSUPPORTED:
        raise ValueError("a weight is not finite, or too large for an FP16 scale")
    _check(status)
    return out
