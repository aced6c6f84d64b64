"""llama.cpp's importance matrix: for each weight matrix, the mean square of the activations that come into each input.

Files are read in both of the forms that ``llama-imatrix`` writes (llama.cpp's tools/imatrix): a GGUF of type "imatrix"
with two tensors for each weight tensor, ``NAME.in_sum2`` (sums of squares) and ``NAME.counts``, both F32; and the older
binary ``.dat``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import GGUFError
from .gguf_file import MAGIC, MAX_NAME, GGUFFile, Q, TensorInfo

Floats = npt.NDArray[np.float32]

SUMS, COUNTS = ".in_sum2", ".counts"
KIND = "imatrix"
MAX_DAT_BYTES = 1 << 30


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """Load importance by tensor name: float32 (K,), or (M, K) for a stack of M matrices; see :func:`importance_of`.

    A matrix that no token reached (an expert) has ones. Names without a ``blk.`` number are kept as they are.

    Raises:
        GGUFError: the file is no importance matrix, is damaged, or has values that make no sense.
        OSError: it cannot be read.
    """
    path = Path(path)
    with path.open("rb") as f:
        magic = f.read(4)
    if magic == MAGIC:
        return _load_gguf(path)
    return _load_dat(path)


def _mean(path: Path, name: str, sums: Floats, counts: Floats) -> Floats:
    """Divide sums (M, K) by counts (M,); ones where nothing was counted."""
    if not (np.isfinite(sums).all() and (sums >= 0).all()):
        raise GGUFError(f"{path}: the sums of {name!r} have a value that is negative or not finite")
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise GGUFError(f"{path}: the counts of {name!r} have a value that is negative or not finite")
    seen = np.rint(counts.astype(np.float64))[:, None]
    mean = np.divide(sums, seen, out=np.ones(sums.shape, np.float64), where=seen > 0).astype(np.float32)
    return mean[0] if len(mean) == 1 else mean


def _load_gguf(path: Path) -> dict[str, Floats]:
    with GGUFFile(path) as f:
        kind = f.kv.get("general.type")
        if kind is None or kind.value != KIND:
            raise GGUFError(f"{path} is a GGUF, but no importance matrix (general.type is not {KIND!r})")
        pairs: dict[str, dict[str, TensorInfo]] = {}
        for t in f.tensors.values():
            for suffix in (SUMS, COUNTS):
                if t.name.endswith(suffix):
                    pairs.setdefault(t.name.removesuffix(suffix), {})[suffix] = t
        if not pairs:
            raise GGUFError(f"{path} has no importance of any tensor")
        return {name: _entry(f, name, pair) for name, pair in pairs.items()}


def _entry(f: GGUFFile, name: str, pair: dict[str, TensorInfo]) -> Floats:
    if len(pair) != 2:
        raise GGUFError(f"{f.path}: {name!r} has {next(iter(pair))} only, {SUMS} and {COUNTS} belong together")
    sums, counts = pair[SUMS], pair[COUNTS]
    if sums.type != Q.F32 or counts.type != Q.F32:
        raise GGUFError(f"{f.path}: {name!r} is {sums.type.name} and {counts.type.name}, F32 is needed")
    matrices = counts.k * counts.rows
    if (sums.k * sums.rows) % matrices != 0 or sums.rows % matrices != 0:
        raise GGUFError(f"{f.path}: {name!r} has sums of shape {list(sums.ne)} but {matrices} counts")
    values = f.read(sums.offset, sums.nbytes).view(np.float32).reshape(matrices, -1)
    return _mean(f.path, name, values, f.read(counts.offset, counts.nbytes).view(np.float32))


def _load_dat(path: Path) -> dict[str, Floats]:
    """Load the form before GGUF: entries of name, calls and sums, all little-endian int32 and float32."""
    size = path.stat().st_size
    if size > MAX_DAT_BYTES:
        raise GGUFError(f"{path} is no GGUF, and too large ({size} bytes) for an old imatrix.dat")
    data, at = path.read_bytes(), 4
    wrong = GGUFError(f"{path} is neither an importance matrix in GGUF nor a sound imatrix.dat")

    def number() -> int:
        nonlocal at
        if at + 4 > size:
            raise wrong
        at += 4
        return int(struct.unpack_from("<i", data, at - 4)[0])

    if size < 4:
        raise wrong
    (n,) = struct.unpack_from("<i", data)
    if not 0 < n <= size // 16:
        raise wrong
    out: dict[str, Floats] = {}
    for _ in range(n):
        length = number()
        if not 0 < length <= MAX_NAME or at + length > size:
            raise wrong
        try:
            name = data[at : at + length].decode()
        except UnicodeDecodeError:
            raise wrong from None
        at += length
        calls, values = number(), number()
        if name in out or calls < 0 or values < 1 or values > (size - at) // 4:
            raise wrong
        sums = np.frombuffer(data, "<f4", values, at).astype(np.float32)
        at += 4 * values
        out[name] = _mean(path, name, sums[None], np.array([max(calls, 1)], np.float32))
    return out


def importance_of(imatrix: Mapping[str, Floats], t: TensorInfo) -> Floats | None:
    """Return the importance of a tensor's inputs, float32 (M, K) for a stack of M matrices (M = 1: a single one), or
    None.

    A stack whose importance was collected for all its matrices together has equal rows.

    Raises:
        GGUFError: the file has another number of inputs for this tensor: it was made from another model.
    """
    found = imatrix.get(t.name)
    if found is None:
        return None
    matrices = t.rows // t.ne[1] if len(t.ne) > 1 else 1
    if found.size == t.k:
        return np.broadcast_to(found.reshape(1, t.k), (matrices, t.k))
    if found.size == t.k * matrices:
        return found.reshape(matrices, t.k)
    raise GGUFError(
        f"the importance of tensor {t.name!r} is for {found.size} inputs, the model has {t.k}: it belongs to another "
        "model"
    )
