"""Small GGUF files for tests, written with the gguf package, and models cut into parts."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize as gguf_quantize
from tilebeam.gguf import GGUFFile, TensorInfo, cli, ggml_values
from tilebeam.gguf import gguf_write as w
from typer.testing import CliRunner

Q = gguf.GGMLQuantizationType
U8 = np.ndarray[Any, np.dtype[np.uint8]]


def gaussian(n: int, k: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 0.05, (n, k)).astype(np.float32)


def blocks(type: gguf.GGMLQuantizationType, n: int, k: int, seed: int) -> U8:
    """Rows of a quantized type; IQ4_NL, which numpy cannot quantize to, from random quants and scales."""
    if type != Q.IQ4_NL:
        return gguf_quantize(gaussian(n, k, seed), type)
    rng = np.random.default_rng(seed)
    b = rng.integers(0, 256, (n, k // 32, 18)).astype(np.uint8)
    b[..., :2] = rng.normal(0, 0.01, (n, k // 32, 1)).astype(np.float16).view(np.uint8)
    return b.reshape(n, -1)


def ggml_quantized(type: gguf.GGMLQuantizationType, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows in any ggml type, by ggml's own quantizer."""
    if type == Q.BF16:
        return gguf.quants.quantize(x, type).reshape(-1)
    call = ggml_values._library().ggml_quantize_chunk
    call.restype, call.argtypes = (
        ctypes.c_size_t,
        [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    )
    rows, k = x.shape
    block, size = gguf.GGML_QUANT_SIZES[type]
    out = np.empty(rows * k // int(block) * int(size), np.uint8)
    source = np.ascontiguousarray(x, np.float32)
    assert call(int(type), source.ctypes.data, out.ctypes.data, 0, rows, k, None) == out.size
    return out


@contextmanager
def writer(path: Path, arch: str = "llama") -> Iterator[gguf.GGUFWriter]:
    """A writer of a GGUF file, which is there when the block has ended."""
    w = gguf.GGUFWriter(path, arch)
    yield w
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_gguf(path: Path, *, alignment: int | None = None, big: int = 96) -> Path:
    """A small model-like file with every kind of tensor and value."""
    with writer(path) as w:
        w.add_name("tiny")
        w.add_uint32("llama.block_count", 1)
        w.add_float32("llama.rope.freq_base", 1e4)
        w.add_bool("tokenizer.ggml.add_bos_token", True)
        w.add_uint64("llama.big", 1 << 40)
        w.add_array("tokenizer.ggml.tokens", ["<s>", "a", "ü", ""])
        w.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0])
        w.add_file_type(2)
        if alignment is not None:
            w.add_custom_alignment(alignment)
        w.add_tensor("token_embd.weight", blocks(Q.Q8_0, 64, 64, 1), raw_dtype=Q.Q8_0)
        w.add_tensor("blk.0.attn_norm.weight", np.ones(64, np.float32))
        w.add_tensor("blk.0.attn_q.weight", blocks(Q.Q4_0, big, 64, 2), raw_dtype=Q.Q4_0)
        w.add_tensor("blk.0.attn_k.weight", blocks(Q.Q8_0, 32, 64, 3), raw_dtype=Q.Q8_0)
        w.add_tensor("blk.0.attn_v.weight", blocks(Q.IQ4_NL, 32, 64, 4), raw_dtype=Q.IQ4_NL)
        w.add_tensor("blk.0.attn_output.weight", gaussian(64, 64, 5).astype(np.float16))
        w.add_tensor("blk.0.ffn_gate.weight", blocks(Q.Q4_0, 40, 64, 6), raw_dtype=Q.Q4_0)  # N is not whole tiles
        w.add_tensor("blk.0.ffn_up.weight", blocks(Q.Q5_0, 64, 64, 7), raw_dtype=Q.Q5_0)
        stack = blocks(Q.Q8_0, 3 * 32, 96, 8).reshape(3, 32, -1)
        w.add_tensor("blk.0.attn_k_b.weight", stack, raw_dtype=Q.Q8_0)
        w.add_tensor("blk.0.ffn_up_exps.weight", stack, raw_dtype=Q.Q8_0)
        w.add_tensor("output.weight", gaussian(64, 64, 9))
    return path


def split_model(model: Path, stem: Path, cuts: Sequence[int]) -> list[Path]:
    """A model in parts as llama-gguf-split names and marks them: `stem`-00001-of-0000N.gguf and so on.

    Args:
        cuts: indices of the tensors that a new part begins with.
    """
    paths = []
    with GGUFFile(model) as f:
        tensors, kv = list(f.tensors.values()), [r.raw for r in f.kv.values()]
        edges = [0, *cuts, len(tensors)]
        count = len(edges) - 1
        for i in range(count):
            part = tensors[edges[i] : edges[i + 1]]
            own = [
                scalar("split.no", 2, struct.pack("<H", i)),
                scalar("split.count", 2, struct.pack("<H", count)),
                scalar("split.tensors.count", 5, struct.pack("<i", len(tensors))),
            ]
            paths.append(stem.with_name(f"{stem.name}-{i + 1:05}-of-{count:05}.gguf"))
            _copy(f, paths[-1], [*(kv if i == 0 else []), *own], part)
    return paths


def with_metadata(model: Path, path: Path, changes: dict[str, bytes | None], lacks: str | None = None) -> Path:
    """The same model with other metadata records, by key; None leaves one out. Without tensors that `lacks` is a regex
    of."""
    with GGUFFile(model) as f:
        records = {key: kv.raw for key, kv in f.kv.items()} | changes
        tensors = [t for t in f.tensors.values() if lacks is None or not re.search(lacks, t.name)]
        _copy(f, path, [raw for raw in records.values() if raw is not None], tensors)
    return path


def _copy(f: GGUFFile, path: Path, kv: Sequence[bytes], tensors: Sequence[TensorInfo]) -> None:
    """Write a file of some of another's tensors."""
    specs = [(t.name, t.type, t.ne) for t in tensors]
    write_raw(path, kv, specs, (f.read(t.offset, t.nbytes) for t in tensors), f.alignment)


def write_raw(
    path: Path,
    kv: Iterable[bytes],
    tensors: Sequence[tuple[str, gguf.GGMLQuantizationType, tuple[int, ...]]],
    data: Iterable[np.ndarray[Any, Any]] = (),
    alignment: int = 32,
) -> Path:
    """Write a file of records, names, types and shapes of tensors, and their bytes; without `data`, zeros."""
    head, offsets, size = w.header(3, [*kv], tensors, alignment)
    with path.open("wb") as out:
        out.write(head)
        out.truncate(size)
        for at, values in zip(offsets, data, strict=False):
            out.seek(at)
            out.write(values.tobytes())
    return path


def retyped(model: Path, path: Path, types: dict[str, gguf.GGMLQuantizationType]) -> Path:
    """The same model with other weights where a regex matches a tensor's name: random blocks of the regex's type, one
    whose blocks begin with their FP16 scale (IQ2_XXS, IQ3_S, Q4_1 ..), or NVFP4."""
    with GGUFFile(model) as f:
        changed = {n: t for n in f.tensors for pattern, t in types.items() if re.search(pattern, n)}
        specs = [(t.name, changed.get(t.name, t.type), t.ne) for t in f.tensors.values()]
        data = (
            _random_blocks(t, changed[t.name]) if t.name in changed else f.read(t.offset, t.nbytes)
            for t in f.tensors.values()
        )
        return write_raw(path, (kv.raw for kv in f.kv.values()), specs, data, f.alignment)


def _random_blocks(t: TensorInfo, type: gguf.GGMLQuantizationType) -> U8:
    block, size = gguf.GGML_QUANT_SIZES[type]
    n = int(np.prod(t.ne)) // int(block)
    made = np.random.default_rng(n).integers(0, 256, (n, int(size))).astype(np.uint8)
    if type == gguf.GGMLQuantizationType.NVFP4:
        made[:, :4] = 0x20  # an eighth
    else:
        made[:, :2] = np.full((n, 1), 0.002, np.float16).view(np.uint8)
    return made


def scalar(key: str, kind: int, value: bytes) -> bytes:
    """A metadata record of any scalar type."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def only_files(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


def stored(path: Path, name: str) -> U8:
    """A tensor's bytes."""
    with GGUFFile(path) as f:
        t = f.tensors[name]
        return f.read(t.offset, t.nbytes)


def repack(*args: object) -> Any:
    """What gguf-repack says."""
    return CliRunner().invoke(cli.app, [str(a) for a in args])
