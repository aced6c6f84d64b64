"""gguf-repack: what is written, what comes back, what is refused, and that nothing half-made is left."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_kit import blocks, gaussian, only_files, stored, with_metadata, write_gguf, writer
from gguf_kit import repack as repack_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type, pack, unpack
from tilebeam.gguf import GGUFError, cli, repack, stream
from tilebeam.gguf.byte_bar import byte_bar
from tilebeam.gguf.gguf_write import kv_u32

from bench.lib.synth import preset, write_model

Q = gguf.GGMLQuantizationType


TILED_AS_IS = {
    "blk.0.attn_q.weight": Type.Q4_0_COL,
    "blk.0.attn_k.weight": Type.Q8_0_COL,
    "blk.0.attn_v.weight": Type.IQ4_NL_COL,
    "blk.0.ffn_up.weight": Type.Q5_0_COL,
    "blk.0.attn_k_b.weight": Type.Q8_0_COL,
    "blk.0.ffn_up_exps.weight": Type.Q8_0_COL,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf")


@pytest.fixture
def packed(model: Path, tmp_path: Path) -> Path:
    gguf_tools.pack(model, tmp_path / "packed.gguf")
    return tmp_path / "packed.gguf"


# ---- packing and back


@pytest.mark.parametrize("alignment", [None, 32, 64, 256])
@pytest.mark.parametrize("threads", [1, 3])
def test_unpacking_gives_back_the_very_file(tmp_path: Path, alignment: int | None, threads: int) -> None:
    model = write_gguf(tmp_path / "model.gguf", alignment=alignment)
    report = gguf_tools.pack(model, tmp_path / "p.gguf", threads=threads)
    assert report.lossless
    assert (report.n_tensors, report.n_tiled) == (11, 6)
    assert report.size == (tmp_path / "p.gguf").stat().st_size
    gguf_tools.unpack(tmp_path / "p.gguf", tmp_path / "back.gguf", threads=threads)
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()
    only_files(tmp_path, "model.gguf", "p.gguf", "back.gguf")


def spoil_padding(data: bytearray, f: gguf_tools.GGUFFile) -> None:
    at, _ = next((at, n) for at, n in f.padding() if n)
    data[at] = 1


def add_a_tail(data: bytearray, _: gguf_tools.GGUFFile) -> None:
    data.extend(b"trailing")


def cut_the_last_padding(data: bytearray, f: gguf_tools.GGUFFile) -> None:
    del data[max(t.offset + t.nbytes for t in f.tensors.values()) :]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_padding, "nonzero bytes in its padding"),
        (add_a_tail, "8 bytes after its last tensor"),
        (cut_the_last_padding, "ends without the padding of its last tensor"),
    ],
)
def test_lossless_is_said_only_of_the_very_same_bytes(
    tmp_path: Path, spoil: Callable[[bytearray, gguf_tools.GGUFFile], None], why: str
) -> None:
    """Contents are kept whatever the padding; what is not said then is that unpacking gives the same file."""
    model = write_gguf(tmp_path / "model.gguf", alignment=1 << 15)
    packed, back = tmp_path / "p.gguf", tmp_path / "back.gguf"
    assert gguf_tools.pack(model, packed).lossless
    data = bytearray(model.read_bytes())
    with gguf_tools.GGUFFile(model) as f:
        spoil(data, f)
    model.write_bytes(data)
    result = repack_cli("pack", "-f", model, packed)
    assert result.stderr.splitlines()[-1].endswith("converted, same contents")
    assert "not the same bytes: the source" in result.stderr
    assert why in result.stderr
    repacked = gguf_tools.inspect(packed)["repacked"]
    assert (repacked["lossless"], repacked["same_contents"]) == (False, True)
    assert "unpacks to its source's contents" in repack_cli("verify", packed).stdout
    report = gguf_tools.unpack(packed, back)
    assert (report.lossless, report.same_contents) == (False, True)
    assert back.read_bytes() != model.read_bytes()
    assert np.array_equal(stored(back, "blk.0.attn_q.weight"), stored(model, "blk.0.attn_q.weight"))


def test_pieces_of_a_tensor_are_joined_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files whatever the size of a piece."""
    model = write_gguf(tmp_path / "model.gguf", big=32 * 13)
    gguf_tools.pack(model, tmp_path / "whole.gguf")
    monkeypatch.setattr(stream, "PACK_ELEMENTS", 1)
    monkeypatch.setattr(stream, "COPY_BYTES", 97)
    gguf_tools.pack(model, tmp_path / "pieces.gguf", threads=3)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()
    gguf_tools.unpack(tmp_path / "pieces.gguf", tmp_path / "back.gguf", threads=3)
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()


def test_tensors_are_where_the_manifest_says(model: Path, packed: Path) -> None:
    manifest = gguf_tools.manifest(packed)
    assert {t.name: t.type for t in manifest.tensors} == TILED_AS_IS
    assert (manifest.architecture, manifest.layout_version, manifest.lossless) == ("llama", 2, True)
    data = packed.read_bytes()
    for t in manifest.tensors:
        assert t.offset % 128 == 0
        plain = stored(model, t.name)
        assert t.nbytes == plain.size
        k, rows = t.ne[0], int(np.prod(t.ne[1:]))
        tiles = np.frombuffer(data, np.uint8, t.nbytes, t.offset)
        assert np.array_equal(tiles, pack(t.type, plain, k, rows))
        if len(t.ne) == 3:  # a stack: each matrix by itself
            one = t.nbytes // t.ne[2]
            assert np.array_equal(unpack(t.type, tiles[one : 2 * one], k, t.ne[1]), plain[one : 2 * one])


def test_stock_reader_sees_a_sound_file_of_an_unknown_architecture(model: Path, packed: Path) -> None:
    stock, source = gguf.GGUFReader(packed), gguf.GGUFReader(model)

    def field(reader: gguf.GGUFReader, key: str) -> Any:
        return reader.fields[key].contents()

    assert field(stock, "general.architecture") == "tilebeam"
    assert field(stock, "tilebeam.architecture") == "llama"
    assert field(stock, "general.alignment") == 128
    assert field(stock, "tilebeam.source_alignment") == 0
    assert field(stock, "tilebeam.tensors.names") == list(TILED_AS_IS)
    assert field(stock, "tilebeam.tensors.types") == [int(t) for t in TILED_AS_IS.values()]
    # Under its own name llama.cpp would find it as soon as somebody overrides the architecture.
    assert field(stock, "tilebeam.block_count") == field(source, "llama.block_count")
    assert "llama.block_count" not in stock.fields
    for key in source.fields:
        if key.startswith(("GGUF.", "general.architecture", "llama.block_count")):
            continue
        assert field(stock, key) == field(source, key), key
    for a, b in zip(stock.tensors, source.tensors, strict=True):
        assert (a.name, a.tensor_type, list(a.shape)) == (b.name, b.tensor_type, list(b.shape))
        if a.name not in TILED_AS_IS:
            assert np.array_equal(a.data, b.data)


def test_tile_grouping_is_near_and_said_aloud(model: Path, tmp_path: Path) -> None:
    report = gguf_tools.pack(model, tmp_path / "t.gguf", grouping="tile")
    assert report.n_requantized == report.n_tiled
    assert not report.lossless
    assert any("2 x 16" in n for n in report.notes)
    assert any("IQ4_NL" in n and "changed the weights by" in n for n in report.notes)
    manifest = gguf_tools.manifest(tmp_path / "t.gguf")
    types = {t.name: t.type for t in manifest.tensors}
    assert types == {
        "blk.0.attn_q.weight": Type.Q4_0_TILE,
        "blk.0.attn_k.weight": Type.Q8_0_TILE,
        "blk.0.attn_v.weight": Type.IQ4_NL_TILE,
        "blk.0.attn_k_b.weight": Type.Q8_0_TILE,
        "blk.0.ffn_up_exps.weight": Type.Q8_0_TILE,
    }
    back = gguf_tools.unpack(tmp_path / "t.gguf", tmp_path / "back.gguf")
    assert len(back.notes) == 2
    assert not gguf_tools.is_repacked(tmp_path / "back.gguf")
    assert gguf_tools.verify(tmp_path / "t.gguf", against=model).against


# ---- verify


def test_verify(model: Path, packed: Path, tmp_path: Path) -> None:
    assert gguf_tools.verify(packed) == gguf_tools.Verified(11, 6, lossless=True, unpacks=True, against=False)
    assert gguf_tools.verify(packed, deep=False).unpacks is False
    assert gguf_tools.verify(packed, against=model).against
    other = write_gguf(tmp_path / "other.gguf", big=128)
    with pytest.raises(GGUFError, match="was not made from"):
        gguf_tools.verify(packed, against=other)
    with pytest.raises(GGUFError, match="ordinary GGUF"):
        gguf_tools.verify(model)
    with pytest.raises(GGUFError, match="repacked already"):
        gguf_tools.verify(packed, against=packed)


def test_a_missing_source_is_said_before_anything_is_read(packed: Path, tmp_path: Path) -> None:
    read: list[int] = []
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        gguf_tools.verify(packed, against=tmp_path / "none.gguf", progress=lambda done, _: read.append(done))
    assert not read


def test_verify_against_a_source_with_one_other_byte(model: Path, packed: Path) -> None:
    with gguf_tools.GGUFFile(model) as f:
        at = f.tensors["blk.0.attn_norm.weight"].offset
    data = bytearray(model.read_bytes())
    data[at] ^= 1
    model.write_bytes(data)
    with pytest.raises(GGUFError, match=r"'blk.0.attn_norm.weight' is not what"):
        gguf_tools.verify(packed, against=model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int, set[int]]:
    """A folder, a packed file's bytes, where its data begin, and which bytes are padding."""
    folder = tmp_path_factory.mktemp("flip")
    gguf_tools.pack(write_gguf(folder / "m.gguf"), folder / "p.gguf")
    with gguf_tools.GGUFFile(folder / "p.gguf") as f:
        padding = {i for at, n in f.padding() for i in range(at, at + n)}
        return folder, (folder / "p.gguf").read_bytes(), f.data_start, padding


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, whole: tuple[Path, bytes, int, set[int]]) -> None:
    folder, right, end, padding = whole
    raw = bytearray(right)
    in_header = data.draw(st.booleans())
    bit = data.draw(st.integers(0, 8 * end - 1) if in_header else st.integers(8 * end, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    (folder / "p.gguf").write_bytes(raw)
    with pytest.raises(GGUFError):
        gguf_tools.verify(folder / "p.gguf", threads=1)
    with pytest.raises(GGUFError):
        gguf_tools.verify(folder / "p.gguf", deep=False, threads=1)
    # unpacking notices too, unless only padding changed
    if bit // 8 not in padding:
        with pytest.raises(GGUFError):
            gguf_tools.unpack(folder / "p.gguf", folder / "back.gguf", threads=1)
        assert not (folder / "back.gguf").exists()


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    gguf_tools.pack(write_gguf(folder / "m.gguf"), folder / "p.gguf")
    raw = (folder / "p.gguf").read_bytes()
    with gguf_tools.GGUFFile(folder / "p.gguf") as f:
        last = max(t.offset + t.nbytes for t in f.tensors.values())
    (folder / "p.gguf").write_bytes(raw[: int(share * last)])
    for call in (gguf_tools.manifest, gguf_tools.verify, gguf_tools.inspect):
        with pytest.raises(GGUFError, match=r"truncated|empty|not a GGUF"):
            call(folder / "p.gguf")


def test_appended_bytes_are_found(packed: Path) -> None:
    with packed.open("ab") as f:
        f.write(bytes(4096))
    with pytest.raises(GGUFError, match="extra bytes"):
        gguf_tools.verify(packed)


def replace_u32(path: Path, key: str, value: int) -> None:
    """Change a number of the metadata in place."""
    with gguf_tools.GGUFFile(path) as f:
        raw = f.kv[key].raw
    data = path.read_bytes()
    assert data.count(raw) == 1
    path.write_bytes(data.replace(raw, raw[:-4] + struct.pack("<I", value)))


def test_another_layout_version_is_refused(packed: Path, tmp_path: Path) -> None:
    replace_u32(packed, "tilebeam.layout_version", 3)
    for call in (gguf_tools.manifest, gguf_tools.verify, lambda p: gguf_tools.unpack(p, tmp_path / "x.gguf")):
        with pytest.raises(GGUFError, match="layout version 3, this Tilebeam reads 1 to 2"):
            call(packed)
    assert not (tmp_path / "x.gguf").exists()


def test_small_alignment_is_refused(packed: Path) -> None:
    replace_u32(packed, "general.alignment", 64)
    with pytest.raises(GGUFError):
        gguf_tools.manifest(packed)


# ---- inputs that are refused


def test_input_that_is_no_ordinary_gguf(model: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello, world")
    with pytest.raises(GGUFError, match="is empty"):
        gguf_tools.pack(tmp_path / "empty.gguf", out)
    with pytest.raises(GGUFError, match="not a GGUF"):
        gguf_tools.pack(tmp_path / "text.gguf", out)
    with pytest.raises(GGUFError, match="repacked already"):
        gguf_tools.pack(packed, out)
    with pytest.raises(GGUFError, match="ordinary GGUF"):
        gguf_tools.unpack(model, out)
    with pytest.raises(FileNotFoundError):
        gguf_tools.pack(tmp_path / "missing.gguf", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("general.type", "adapter", "an adapter, not a model: .* lora= or --lora"),
        ("general.type", "mmproj", "not a model but the part of one"),
        ("general.type", "imatrix", "not a model but an importance matrix"),
        ("split.count", 2, "one of 2 parts"),
    ],
)
def test_files_that_are_no_whole_model(tmp_path: Path, key: str, value: str | int, why: str) -> None:
    with writer(tmp_path / "f.gguf") as w:
        w.add_string(key, value) if isinstance(value, str) else w.add_uint16(key, value)
        w.add_tensor("output.weight", blocks(Q.Q8_0, 64, 64, 1), raw_dtype=Q.Q8_0)
    with pytest.raises(GGUFError, match=why):
        gguf_tools.pack(tmp_path / "f.gguf", tmp_path / "out.gguf")
    only_files(tmp_path, "f.gguf")


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    x = gaussian(64, 64, 1)
    x[3, 4] = np.inf
    with writer(tmp_path / "f.gguf") as w:
        w.add_tensor("output.weight", x)
    with pytest.raises(GGUFError, match=r"'output.weight' \(F32\) cannot be converted: a weight is not finite"):
        gguf_tools.pack(tmp_path / "f.gguf", tmp_path / "out.gguf", type="q8_0")
    policy = gguf_tools.Policy.make(type="q8_0", tensor_types=["tok=f16"])
    with writer(tmp_path / "f.gguf") as w:
        w.add_tensor("token_embd.weight", x)
        w.add_tensor("output.weight", gaussian(64, 64, 1))
    with pytest.raises(GGUFError, match="too large for F16"):
        gguf_tools.pack(tmp_path / "f.gguf", tmp_path / "out.gguf", policy=policy)
    only_files(tmp_path, "f.gguf")


# ---- outputs


def test_the_source_is_never_overwritten(model: Path, packed: Path, tmp_path: Path) -> None:
    before = model.read_bytes(), packed.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    hard = tmp_path / "hard.gguf"
    os.link(model, hard)
    for target in (model, link, hard):
        with pytest.raises(GGUFError, match="is the source itself"):
            gguf_tools.pack(model, target)
    with pytest.raises(GGUFError, match="is the source itself"):
        gguf_tools.unpack(packed, packed)
    with pytest.raises(GGUFError, match="not a regular file"):
        gguf_tools.pack(model, tmp_path)
    assert (model.read_bytes(), packed.read_bytes()) == before
    only_files(tmp_path, "model.gguf", "packed.gguf", "link.gguf", "hard.gguf")


@pytest.mark.parametrize("existing", [False, True])
def test_no_partial_output_after_an_exception(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    out = tmp_path / "out.gguf"
    if existing:
        out.write_bytes(b"old")
    names = [p.name for p in tmp_path.iterdir()]
    calls = 0

    def progress(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf_tools.pack(model, out, progress=progress, overwrite=True)
    only_files(tmp_path, *names)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left.*bytes are needed"):
        gguf_tools.pack(model, out, overwrite=True)
    monkeypatch.undo()
    monkeypatch.setattr(repack, "write_at", lambda *_: full)
    with pytest.raises(OSError, match="No space left"):
        gguf_tools.pack(model, out, overwrite=True)
    only_files(tmp_path, *names)
    if existing:
        assert out.read_bytes() == b"old"
        monkeypatch.undo()
        gguf_tools.pack(model, out, overwrite=True)
        assert gguf_tools.verify(out, against=model).against


# ---- the command line


def test_bars_are_lines_in_a_file_and_none_before_there_is_something(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_bar("pack") as show:
        assert show is not None
        assert capsys.readouterr().err == ""
        for done in (1 << 20, 2 << 20, 4 << 20):
            show(done, 4 << 20)
    # The first and the last at once; what is between comes every ten seconds.
    assert capsys.readouterr().err == "pack: 1.0 of 4.0 MiB\npack: 4.0 of 4.0 MiB\n"
    with byte_bar("pack", quiet=True) as show:
        assert show is None


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, back = tmp_path / "p.gguf", tmp_path / "b.gguf"
    result = repack_cli("pack", model, packed)
    assert result.exit_code == 0, result.output
    assert "6 tiled" in result.stderr
    assert "Not tiled" in result.stderr
    assert "pack:" in result.stderr  # the progress bar
    assert repack_cli("verify", packed).stdout.startswith(f"{packed}: OK, 11 tensors, 6 tiled, unpacks to its source")
    assert "11 tensors hold its very values" in repack_cli("verify", packed, "--against", model).stdout
    assert repack_cli("unpack", packed, back, "-q").exit_code == 0
    assert back.read_bytes() == model.read_bytes()
    text = repack_cli("inspect", packed).stdout
    assert "tile layout version 2, 6 tiled tensors" in text
    info = json.loads(repack_cli("inspect", packed, "--json").stdout)
    assert info["architecture"] == "llama"
    assert info["repacked"]["n_tiled"] == 6
    assert info["types"]["q4_0_col"] == {"tensors": 1, "bytes": 96 * 36}
    assert info["metadata"]["tokenizer.ggml.tokens"] == {"array": 4}
    assert json.loads(repack_cli("inspect", model, "--json").stdout)["repacked"] is None
    assert repack_cli("pack", model, tmp_path / "x.gguf", "--type", "q2_k").exit_code == 2
    assert repack_cli("pack", model, tmp_path / "x.gguf", "--group", "tile", "--type", "q4_0").exit_code == 0
    # failures: one line, status 1
    assert cli.run(lambda: gguf_tools.pack(packed, back)) == 1
    assert cli.run(lambda: gguf_tools.pack(tmp_path / "none.gguf", back)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"gguf-repack: {packed} is repacked already; unpack it first"
    assert lines[1] == f"gguf-repack: {tmp_path / 'none.gguf'}: No such file or directory"


def test_layers_that_llama_cpp_may_skip_stay_blocks(tmp_path: Path) -> None:
    layers = write_model(tmp_path / "whole.gguf", preset("tiny", n_layer=2))
    ahead = with_metadata(layers, tmp_path / "m.gguf", {(key := "llama.nextn_predict_layers"): kv_u32(key, 1)})
    gguf_tools.pack(ahead, tmp_path / "p.gguf")
    assert {t.name.split(".")[1] for t in gguf_tools.manifest(tmp_path / "p.gguf").tensors} == {"0", "weight"}
