"""The strict GGUF reader: damaged and lying headers are refused with a sentence, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_kit import only_files, with_metadata, write_gguf, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import GGUFError, gguf_file, gguf_write, weights
from tilebeam.gguf.gguf_write import kv_bool, kv_text, kv_texts, kv_u32


def raw_gguf(version: int = 3, kv: bytes = b"", n_kv: int = 0, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv) + kv + tensors


ARCH = gguf_write.kv_text("general.architecture", "llama")


def one_tensor(name: str = "t", ne: tuple[int, ...] = (32,), type: int = 0, offset: int = 0, n_dims: int = -1) -> bytes:
    n = len(name.encode())
    dims = struct.pack(f"<I{len(ne)}Q", len(ne) if n_dims < 0 else n_dims, *ne)
    return struct.pack("<Q", n) + name.encode() + dims + struct.pack("<IQ", type, offset)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (raw_gguf(version=1), "version 1"),
        (raw_gguf(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGU", "not a GGUF"),
        (raw_gguf(n_kv=2**60), "truncated"),
        (raw_gguf(n_tensors=2**63), "truncated"),
        (raw_gguf(kv=ARCH + ARCH, n_kv=2), "occurs twice"),
        (raw_gguf(kv=gguf_write.kv_u32("", 1) + bytes(64), n_kv=1), "is empty"),
        (raw_gguf(kv=struct.pack("<Q", 2**40) + bytes(64), n_kv=1), "at most 65535"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1), n_kv=1), "UTF-8"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<II", 13, 1), n_kv=1), "unknown value type"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 7, 2), n_kv=1), "bool of value 2"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + bytes(40), n_kv=1), "unsupported"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61) + bytes(40), n_kv=1), "truncated"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 10, 2**61) + bytes(40), n_kv=1), "truncated"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQQ", 9, 8, 1, 2**63), n_kv=1), "truncated"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 2**63), n_kv=1), "truncated"),
        (raw_gguf(kv=gguf_write.kv_u32("general.alignment", 48), n_kv=1), "power of two"),
        (raw_gguf(kv=gguf_write.kv_u32("general.alignment", 0), n_kv=1), "power of two"),
        (raw_gguf(kv=gguf_write.kv_u32("general.alignment", 1 << 31), n_kv=1), "power of two"),
        (raw_gguf(kv=gguf_write.kv_text("general.alignment", "32"), n_kv=1), "power of two"),
        (raw_gguf(tensors=one_tensor("x" * 64) + bytes(512), n_tensors=1), "at most 63"),
        (raw_gguf(tensors=one_tensor("") + bytes(512), n_tensors=1), "is empty"),
        (raw_gguf(tensors=one_tensor() + one_tensor(offset=128) + bytes(512), n_tensors=2), "occurs twice"),
        (raw_gguf(tensors=one_tensor(n_dims=0) + bytes(512), n_tensors=1), "0 dimensions"),
        (raw_gguf(tensors=one_tensor(n_dims=5) + bytes(512), n_tensors=1), "5 dimensions"),
        (raw_gguf(tensors=one_tensor(ne=(0,)) + bytes(512), n_tensors=1), "impossible shape"),
        (raw_gguf(tensors=one_tensor(ne=(2**32, 2**32)) + bytes(512), n_tensors=1), "impossible shape"),
        (raw_gguf(tensors=one_tensor(ne=(2**63, 2)) + bytes(512), n_tensors=1), "impossible shape"),
        (raw_gguf(tensors=one_tensor(ne=(2**40,)) + bytes(512), n_tensors=1), "truncated"),
        (raw_gguf(tensors=one_tensor(type=4) + bytes(512), n_tensors=1), "unknown type 4"),
        (raw_gguf(tensors=one_tensor(type=2**31) + bytes(512), n_tensors=1), "unknown type"),
        (raw_gguf(tensors=one_tensor(ne=(33,), type=2) + bytes(512), n_tensors=1), "whole Q4_0 blocks"),
        (raw_gguf(tensors=one_tensor(offset=32) + bytes(512), n_tensors=1), "offset 32, expected 0"),
        (raw_gguf(tensors=one_tensor() + bytes(16), n_tensors=1), "truncated"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(GGUFError, match=why):
        gguf_tools.GGUFFile(tmp_path / "x.gguf")


def string_array(key: str, n: int) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, 8, n)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (raw_gguf(kv=string_array("k", 2**36), n_kv=1), "claims 68719476736 strings"),
        (raw_gguf(kv=string_array("k", 2**30), n_kv=1), "a header of more than 64 MiB"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**30), n_kv=1), "more than 64 MiB"),
        (raw_gguf(kv=struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 2**30), n_kv=1), "more than 64 MiB"),
        (raw_gguf(n_kv=2**24), "at most 65536 of each"),
        (raw_gguf(kv=ARCH, n_kv=1, n_tensors=2**24), "at most 65536 of each"),
        (raw_gguf(kv=ARCH, n_kv=1, tensors=struct.pack("<Q", 2**40), n_tensors=1), "at most 63"),
    ],
)
def test_claims_that_a_huge_file_could_keep_are_bounded(tmp_path: Path, head: bytes, why: str) -> None:
    """A sparse file of 16 GiB: refused within seconds and a small part of its size."""
    path = tmp_path / "x.gguf"
    with path.open("wb") as f:
        f.write(head)
        f.truncate(1 << 34)
    code = (
        "import sys\nfrom tilebeam import gguf as gguf_tools\n"
        # not ru_maxrss, which a process started by vfork inherits from the one that started it
        "def peak():\n    lines = open('/proc/self/status')\n"
        "    return next(int(x.split()[1]) for x in lines if x.startswith('VmHWM'))\n"
        "before = peak()\n"
        "try:\n    gguf_tools.GGUFFile(sys.argv[1])\n"
        "except gguf_tools.GGUFError as e:\n    print(e)\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True, timeout=120
    )
    said, grown = done.stdout.splitlines()
    assert why in said
    if "TILEBEAM_SANITIZE" not in os.environ:  # AddressSanitizer keeps freed memory
        assert int(grown) < 160 << 10  # KiB


def test_a_header_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, where a mapping would end the process with SIGBUS."""
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "READ_AHEAD", 64)
    real = gguf_tools.GGUFFile.read

    def read(self: gguf_tools.GGUFFile, offset: int, n: int) -> Any:
        if offset > 200:
            os.truncate(path, 150)
        return real(self, offset, n)

    monkeypatch.setattr(gguf_tools.GGUFFile, "read", read)
    with pytest.raises(GGUFError, match="became shorter"):
        gguf_tools.GGUFFile(path)


@pytest.mark.parametrize("name", ["", "lla\udc91a", "two words", "x" * 65, "a/b"])
def test_architectures_that_are_no_names(tmp_path: Path, name: str) -> None:
    raw = name.encode("utf-8", "surrogateescape")
    kv = gguf_write.kv_text("general.architecture", "")[:-8] + struct.pack("<Q", len(raw)) + raw
    (tmp_path / "x.gguf").write_bytes(raw_gguf(kv=kv, n_kv=1, tensors=one_tensor(), n_tensors=1) + bytes(512))
    for call in (gguf_tools.is_repacked, gguf_tools.inspect):
        with pytest.raises(GGUFError, match="which is not a valid name"):
            call(tmp_path / "x.gguf")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(GGUFError, match="not a regular file"):
            gguf_tools.GGUFFile(path)


@settings(max_examples=150, deadline=None)
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=4))
def test_damaged_headers_never_do_worse_than_gguferror(
    edits: list[tuple[float, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    raw = bytearray(write_gguf(folder / "m.gguf").read_bytes())
    with gguf_tools.GGUFFile(folder / "m.gguf") as f:
        end = f.header_end
    for share, new in edits:
        at = int(share * end)
        raw[at : at + len(new)] = new
    (folder / "m.gguf").write_bytes(raw)
    try:
        gguf_tools.inspect(folder / "m.gguf")
        gguf_tools.pack(folder / "m.gguf", folder / "p.gguf", threads=1)
    except GGUFError:
        only_files(folder, "m.gguf")
    else:
        assert gguf_tools.verify(folder / "p.gguf", against=folder / "m.gguf", threads=1).against


@pytest.mark.parametrize(
    "kv",
    [
        {"head_count": kv_u32, "head_count_kv": kv_bool},
        {"head_count": kv_bool, "rope.dimension_count": kv_u32},
        {"head_count": kv_u32, "rope.dimension_count": kv_u32, "embedding_length": kv_text},
        {"head_count": kv_u32, "rope.dimension_count": kv_u32, "embedding_length": kv_texts},
    ],
)
def test_metadata_of_other_types_is_left_to_llama_cpp(kv: dict[str, Any], tmp_path: Path) -> None:
    values = {kv_u32: 4, kv_bool: False, kv_text: "4", kv_texts: ["4"]}
    places = {name: f"llama.{'attention.' * name.startswith('head')}{name}" for name in kv}
    changes = {places[name]: make(places[name], values[make]) for name, make in kv.items()}
    with gguf_tools.GGUFFile(with_metadata(write_gguf(tmp_path / "m.gguf"), tmp_path / "n.gguf", changes)) as f:
        gguf_tools.check_model(f, "llama")


def test_a_digit_that_is_no_number_is_no_layer(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.gguf", [ARCH], [("blk.².ffn_up.weight", gguf.GGMLQuantizationType.F16, (32, 32))])
    assert gguf_tools.inspect(path)["device_share"] == 1
    assert weights.layer_of("blk.².ffn_up.weight", 4) == weights.layer_of("blk.4.ffn_up.weight", 4) == 4


def test_metadata_values_are_what_gguf_py_wrote(tmp_path: Path) -> None:
    with gguf_tools.GGUFFile(write_gguf(tmp_path / "m.gguf")) as f:
        values = {key: kv.value for key, kv in f.kv.items()}
    assert values == {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": 1,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.add_bos_token": True,
        "llama.big": 1 << 40,
        "tokenizer.ggml.tokens": ["<s>", "a", "ü", ""],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0],
        "general.file_type": 2,
    }
