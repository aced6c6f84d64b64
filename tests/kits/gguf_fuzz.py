"""What must hold for any bytes that somebody calls a GGUF: the fuzz target's check, and files to start from.

Used by ``tests/fuzz/repack.py``, which lets coverage guide the bytes, and by ``test_gguf_fuzz.py``, which replays what
that found worth keeping.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import GGUFError, Policy, contents, gguf_write

Q = gguf.GGMLQuantizationType

# A header may claim anything; what it makes the reader do stays far below these.
MAX_BYTES = 1 << 16
TILE_NEXT = Policy.make(type="q8_0", grouping="tile", tensor_types=["ffn=iq4_nl:column"])


def check(data: bytes, folder: Path) -> str:
    """Do with a file of these bytes everything gguf-repack can; say how far it got.

    Anything but :class:`GGUFError` is a finding, and so is a packed file that does not verify or does not unpack to
    its source.
    """
    path, packed, back = folder / "in.gguf", folder / "packed.gguf", folder / "back.gguf"
    path.write_bytes(data)
    try:
        info = gguf_tools.inspect(path)
    except GGUFError:
        for call in (gguf_tools.is_repacked, gguf_tools.manifest, gguf_tools.open_gguf, gguf_tools.verify):
            _refused(call, path)
        signed = _signed(path)
        if signed is None:
            return "refused"
        path.write_bytes(signed)
        _refused(gguf_tools.manifest, path)
        _refused(gguf_tools.inspect, path)
        return "refused, then " + _repacked(path, back)
    assert info["size"] == len(data)
    if info["repacked"] is not None:
        return _repacked(path, back)
    with gguf_tools.GGUFFile(path) as f, contextlib.suppress(GGUFError):
        gguf_tools.check_model(f, f.architecture)
    try:
        report = gguf_tools.pack(path, packed, threads=1)
    except GGUFError:
        assert not packed.exists()
        return _quantized(path, packed)
    assert report.same_contents
    assert report.size == packed.stat().st_size
    assert gguf_tools.verify(packed, against=path, threads=1).exact == report.n_tensors
    assert gguf_tools.verify(packed, threads=1).unpacks
    gguf_tools.unpack(packed, back, threads=1)
    _same(path, back)
    assert report.lossless == (back.read_bytes() == data)
    for made in (packed, back):
        made.unlink()
    _quantized(path, packed)
    return "packed"


def _refused(call: object, path: Path) -> None:
    try:
        found = call(path)  # type: ignore[operator]
    except GGUFError:
        return
    # a part of a split model may be read although the whole is refused, and a header alone may be sound
    if hasattr(found, "close"):
        found.close()


def _signed(path: Path) -> bytes | None:
    """A repacked file whose metadata digest fits: what only somebody who means harm would write."""
    try:
        with gguf_tools.GGUFFile(path) as f:
            kv = f.kv.get(contents.K_META)
            records = [x.raw for key, x in f.kv.items() if key != contents.K_META]
            right = contents.meta_digest(records, f.tensors.values())
    except GGUFError:
        return None
    if kv is None or kv.raw == gguf_write.kv_text(contents.K_META, right):
        return None
    return path.read_bytes().replace(kv.raw, gguf_write.kv_text(contents.K_META, right))


def _repacked(path: Path, back: Path) -> str:
    try:
        gguf_tools.verify(path, threads=1)
        gguf_tools.unpack(path, back, threads=1)
    except GGUFError:
        assert not back.exists()
        return "repacked, damaged"
    back.unlink()
    return "repacked"


def _quantized(path: Path, packed: Path) -> str:
    try:
        gguf_tools.pack(path, packed, policy=TILE_NEXT, threads=1)
    except GGUFError:
        assert not packed.exists()
        return "read"
    gguf_tools.verify(packed, against=path, threads=1)
    packed.unlink()
    return "quantized"


def _same(a: Path, b: Path) -> None:
    """Tensors and metadata, whatever lies in the padding."""
    with gguf_tools.GGUFFile(a) as f, gguf_tools.GGUFFile(b) as g:
        assert [kv.raw for kv in f.kv.values()] == [kv.raw for kv in g.kv.values()]
        assert list(f.tensors) == list(g.tensors)
        for t, u in zip(f.tensors.values(), g.tensors.values(), strict=True):
            assert (t.type, t.ne) == (u.type, u.ne)
            assert np.array_equal(f.read(t.offset, t.nbytes), g.read(u.offset, u.nbytes))


def _write(path: Path, tensors: dict[str, gguf.GGMLQuantizationType | None], **values: object) -> bytes:
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(path, str(values.pop("arch", "llama")))
    for key, value in values.items():
        name = key.replace("__", ".")
        if name == "general.alignment":
            w.add_custom_alignment(int(str(value)))
        elif isinstance(value, bool):
            w.add_bool(name, value)
        elif isinstance(value, int):
            w.add_uint32(name, value)
        elif isinstance(value, float):
            w.add_float32(name, value)
        elif isinstance(value, str):
            w.add_string(name, value)
        else:
            w.add_array(name, value)  # type: ignore[arg-type]
    for name, type in tensors.items():
        if type is None:
            w.add_tensor(name, rng.normal(size=32).astype(np.float32))
            continue
        block, size = gguf.GGML_QUANT_SIZES[type]
        k = max(32, int(block))
        if type == Q.F32:
            w.add_tensor(name, rng.normal(size=(32, k)).astype(np.float32))
            continue
        data = rng.integers(0, 60, (32, k // int(block) * int(size))).astype(np.uint8)
        w.add_tensor(name, data, raw_dtype=type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.read_bytes()


def seeds() -> list[bytes]:
    """Small files of every kind: ordinary, quantized in several ways, repacked, a part of a split model."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        vocabulary = ["<s>", "a", "ü", ""]
        made = [
            _write(path, {"blk.0.attn_q.weight": Q.Q4_0}),
            _write(path, {"blk.0.attn_q.weight": Q.Q8_0, "blk.0.attn_norm.weight": None}, general__alignment=64),
            _write(path, {"token_embd.weight": Q.Q4_K, "blk.0.ffn_up.weight": Q.IQ4_NL}, llama__block_count=1),
            _write(
                path, {"token_embd.weight": Q.F32, "blk.0.ffn_up.weight": Q.IQ3_S}, tokenizer__ggml__tokens=vocabulary
            ),
            _write(path, {"output.weight": Q.Q6_K}, a=1.5, b=True, c=[1, 2, 3], general__type="model"),
            _write(path, {"blk.0.attn_q.weight": Q.Q4_0}, split__count=2, split__no=1, split__tensors__count=3),
        ]
        _write(path, {"token_embd.weight": Q.Q4_1, "blk.0.ffn_up.weight": Q.Q8_0, "blk.0.ffn_norm.weight": None})
        packed = path.with_name("p.gguf")
        for policy in (Policy(), TILE_NEXT):
            gguf_tools.pack(path, packed, policy=policy, overwrite=True)
            made.append(packed.read_bytes())
    assert all(len(data) < MAX_BYTES for data in made)
    return made


def scratch() -> TemporaryDirectory[str]:
    """A folder in memory where there is one."""
    return TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
