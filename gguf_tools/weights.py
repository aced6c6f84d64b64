"""Matrix weights and their values: float32 from any ggml type, and back to plain blocks or tiles."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import TILE, Type

from . import ggml_values
from .errors import GGUFError
from .gguf_file import Bytes, Q, TensorInfo
from .quantize import ErrorSum, quantize_rows
from .split import Source

Floats = npt.NDArray[np.float32]

# The types of weights that the device multiplies by, of those that the gguf package knows: 0.19 has no Q2_0.
_KNOWN = {q.value for q in Q}
TB_TYPE = {Q(t.ggml): t for t in Type if t.is_multiplied and not ggml_ext.is_tiled(t) and t.ggml in _KNOWN}
BLOCK = 32  # elements of a block of each quantized type in TB_TYPE
GGML_TYPE = {t: q for q, t in TB_TYPE.items()}
FLOAT_TYPES = tuple(q for q, t in TB_TYPE.items() if not t.is_in_tiles)
# Elements of a row; the widest real matrices have about 50,000. 32 rows are held at a time, so this bounds memory.
MAX_ROW = 1 << 18
INTEGER_TYPES = (Q.I8, Q.I16, Q.I32, Q.I64, Q.F64)

# Read by row on the CPU (GET_ROWS), never multiplied in place: parts of names.
LOOKED_UP = (
    "token_embd",
    "position_embd",
    "token_types",
    "embed_tokens",
    "rel_b",
    "tid2eid",
    "_ape",
    "d2t",
    "markov",
    "selector",
)
# Read by other ops than MUL_MAT and MUL_MAT_ID, which know no tiles: biases (ADD, ADD_ID) and convolution kernels.
OTHER_OPS = (".bias", "conv1d", "shortconv.conv", "masked_embd")
# Small or sensitive matrices that llama.cpp's own quantizer leaves alone, too.
KEPT = (
    "_norm",
    "ffn_gate_inp",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv",
    "time_mix_",
    "indexer",
    "patch_embd",
    "pos_embd",
    "rel_pos",
)


def layer_of(name: str, n_layer: int) -> int:
    """Return the layer that a tensor belongs to; `n_layer` for the output and what is beside all layers."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return int(block) if block.isdecimal() and int(block) < n_layer else n_layer


def is_looked_up(name: str) -> bool:
    """Return whether it is an embedding or another table that GET_ROWS reads on the CPU."""
    return any(part in name for part in LOOKED_UP)


def fits_tiles(t: TensorInfo) -> bool:
    """Return whether it may be stored as tiles: K and N multiples of 32, of a matrix that MUL_MAT reads, or of a stack
    of them, such as the experts that MUL_MAT_ID chooses from."""
    return (
        len(t.ne) in (2, 3)
        and t.k <= MAX_ROW
        and t.ne[0] % TILE == 0
        and t.ne[1] % TILE == 0
        and not is_looked_up(t.name)
        and not any(part in t.name for part in OTHER_OPS)
    )


def is_weight(t: TensorInfo) -> bool:
    """Return whether it is a matrix that a quantizer would quantize; embeddings are."""
    if t.type in INTEGER_TYPES or len(t.ne) < 2 or t.k > MAX_ROW:
        return False
    if t.type not in FLOAT_TYPES:
        return True
    return t.name.endswith(".weight") and not any(part in t.name for part in KEPT)


def has_values(type: gguf.GGMLQuantizationType) -> bool:
    """Return whether :func:`to_float` reads this type."""
    return type in TB_TYPE or (type not in INTEGER_TYPES and ggml_values.conversion(type) is not None)


def to_float(type: gguf.GGMLQuantizationType, data: Bytes, k: int, rows: int) -> Floats:
    """Return values of whole rows: uint8 in, float32 (rows, k) out."""
    if type in TB_TYPE:
        return ggml_ext.dequantize(TB_TYPE[type], data, k, rows)
    return ggml_values.to_float(type, data, k * rows).reshape(rows, k)


def tensor_values(f: Source, tensor: TensorInfo) -> Floats:
    """Return all values of a tensor of a file, float32, shaped with the longest stride first as numpy has it.

    Raises:
        GGUFError: its type holds no weights.
    """
    if not has_values(tensor.type):
        raise GGUFError(f"{f.path}: {tensor.name} has the type {tensor.type.name}, which holds no weights")
    data = np.empty(tensor.nbytes, np.uint8)
    f.read_tensor(tensor, 0, data)
    return to_float(tensor.type, data, tensor.k, tensor.rows).reshape(tensor.ne[::-1])


def from_float(
    type: gguf.GGMLQuantizationType, x: Floats, *, search: bool = False, error: ErrorSum | None = None
) -> Bytes:
    """Convert float32 (rows, k) to plain F32, F16, Q8_0, Q4_0 or IQ4_NL rows, uint8; see `quantize_rows`. Raises
    ValueError if a value does not fit."""
    rows, k = x.shape
    if type == Q.F32:
        return x.reshape(-1).view(np.uint8)
    if type == Q.F16:
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        if np.isinf(half).any():
            raise ValueError("a weight is too large for F16")
        if error is not None:
            error.add_values(x, half.astype(np.float32))
        return half.reshape(-1).view(np.uint8)
    column = ggml_ext.column_type(TB_TYPE[type])
    if column is None:
        raise ValueError(f"nothing quantizes to {type.name}")
    return ggml_ext.unpack(column, quantize_rows(column, x, search=search, error=error), k, rows)


def tiled_type(type: gguf.GGMLQuantizationType, grouping: str) -> Type | None:
    """Return the tiled type that a file may have for plain blocks; None if there is none."""
    if type not in TB_TYPE:
        return None
    found = (ggml_ext.tile_type if grouping == "tile" else ggml_ext.column_type)(TB_TYPE[type])
    return found if found is not None and ggml_ext.has_file_form(found) else None


def make_rows(
    source: gguf.GGMLQuantizationType,
    data: Bytes,
    k: int,
    rows: int,
    type: gguf.GGMLQuantizationType,
    tiled: Type | None,
    out: Bytes | None = None,
    *,
    search: bool = False,
    error: ErrorSum | None = None,
) -> Bytes:
    """Convert plain rows of one type to plain rows or tiles of another, the shortest way.

    Args:
        data: uint8, ``rows`` whole rows of ``k`` elements of type ``source``. For tiles, rows is a multiple of 32.
        type: ggml type of the result.
        tiled: its tiled type, None for plain rows.
        out: as many bytes as ``data``, used where the result has that size; a new array otherwise.
        search, error: see `quantize_rows`.

    Raises:
        ValueError: a value is not finite or does not fit.
    """
    if tiled is not None and type == source and tiled == ggml_ext.column_type(TB_TYPE[type]):
        return ggml_ext.pack(tiled, data, k, rows, out)
    values = to_float(source, data, k, rows)
    if tiled is None:
        return from_float(type, values, search=search, error=error)
    return quantize_rows(tiled, values, search=search, error=error)


def unpack_rows(tiled: Type, tiles: Bytes, k: int, rows: int, out: Bytes | None = None) -> Bytes:
    """Convert tiles to plain rows: bit for bit from column grouping (into ``out``), rounded from tile grouping."""
    plain = ggml_ext.source_type(tiled)
    if tiled == ggml_ext.column_type(plain):
        return ggml_ext.unpack(tiled, tiles, k, rows, out)
    return from_float(GGML_TYPE[plain], ggml_ext.dequantize(tiled, tiles, k, rows))
