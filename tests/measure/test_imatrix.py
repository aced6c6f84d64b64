"""Importance matrices: files as llama.cpp writes them, both forms, files that lie, and collecting one."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import process_kit
import pytest
from gguf_kit import Q, only_files, writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam.gguf.errors import GGUFError
from tilebeam.gguf.gguf_file import GGUFFile, TensorInfo
from tilebeam.gguf.imatrix_file import Sums, importance_of, load_imatrix, save_imatrix
from tilebeam.gguf.trim_vocab_llama import LlamaTokenizer

from bench.lib.synth import preset, write_model

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "blk.0.attn_q.weight"


def squares(k: int, matrices: int = 1, seed: int = 1) -> Array:
    return np.random.default_rng(seed).exponential(100, (matrices, k)).astype(np.float32)


def write_imatrix(path: Path, tensors: dict[str, Array], kind: str = "imatrix") -> Path:
    """As llama.cpp's tools/imatrix writes it, with the gguf package."""
    with writer(path, "x") as w:
        w.kv_data[0].clear()  # llama.cpp writes no architecture
        w.add_string("general.type", kind)
        w.add_array("imatrix.datasets", ["wiki.txt"])
        w.add_uint32("imatrix.chunk_count", 3)
        w.add_uint32("imatrix.chunk_size", 512)
        for name, data in tensors.items():
            w.add_tensor(name, data)
    return path


def pair(name: str, sums: Array, counts: Array) -> dict[str, Array]:
    return {f"{name}.in_sum2": sums, f"{name}.counts": counts.reshape(-1, 1).astype(np.float32)}


def info(name: str, *ne: int) -> TensorInfo:
    return TensorInfo(name, Q.F32, ne, 0, 0)


def test_means_are_sums_over_counts(tmp_path: Path) -> None:
    dense, experts = squares(64), squares(32, 3, 2)
    tensors = pair(NAME, dense, np.array([1536.0])) | pair("blk.1.ffn_up_exps.weight", experts, np.array([10, 0, 7]))
    got = load_imatrix(write_imatrix(tmp_path / "i.gguf", tensors))
    assert set(got) == {NAME, "blk.1.ffn_up_exps.weight"}
    assert got[NAME].shape == (64,)
    np.testing.assert_allclose(got[NAME], dense[0] / 1536, rtol=1e-6)
    assert got["blk.1.ffn_up_exps.weight"].shape == (3, 32)
    np.testing.assert_allclose(got["blk.1.ffn_up_exps.weight"][2], experts[2] / 7, rtol=1e-6)
    assert (got["blk.1.ffn_up_exps.weight"][1] == 1).all()  # an expert that no token reached


def test_importance_of_a_stack_and_of_another_model() -> None:
    loaded = {"a": np.ones(64, np.float32), "b": np.arange(96, dtype=np.float32).reshape(3, 32)}
    one = importance_of(loaded, info("a", 64, 128))
    assert one is not None
    assert one.shape == (1, 64)
    stack = importance_of(loaded, info("b", 32, 16, 3))
    assert stack is not None
    assert np.array_equal(stack, loaded["b"])
    shared = importance_of({"b": loaded["b"][0]}, info("b", 32, 16, 3))
    assert shared is not None
    assert np.array_equal(shared, np.tile(loaded["b"][0], (3, 1)))
    assert importance_of(loaded, info("c", 64, 128)) is None
    with pytest.raises(GGUFError, match="another model"):
        importance_of(loaded, info("a", 128, 64))
    with pytest.raises(GGUFError, match="another model"):
        importance_of(loaded, info("b", 32, 16, 4))


def test_what_is_saved_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    sums = {
        "z": Sums(squares(64).astype(np.float64), np.array([512])),
        "a": Sums(squares(32, 4).astype(np.float64), np.array([1, 2, 0, 4])),
    }
    save_imatrix(tmp_path / "o.gguf", sums, datasets=["a.txt", "b.txt"], chunks=2, chunk_size=256)
    r = gguf.GGUFReader(tmp_path / "o.gguf")
    fields = {k: f.contents() for k, f in r.fields.items() if not k.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a.txt", "b.txt"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 256,
    }
    assert [t.name for t in r.tensors] == ["a.in_sum2", "a.counts", "z.in_sum2", "z.counts"]
    for t in r.tensors:
        s = sums[t.name[0]]
        expected = s.squares if t.name.endswith("in_sum2") else s.counts[:, None]
        assert np.array_equal(t.data, expected.astype(np.float32))
    back = load_imatrix(tmp_path / "o.gguf")
    np.testing.assert_allclose(back["z"], sums["z"].squares[0] / 512, rtol=1e-6)
    only_files(tmp_path, "o.gguf")


def test_nothing_collected_or_names_too_long_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="no importance"):
        save_imatrix(tmp_path / "o.gguf", {}, datasets=[], chunks=0, chunk_size=1)
    with pytest.raises(GGUFError, match="too long"):
        save_imatrix(
            tmp_path / "o.gguf",
            {"n" * 60: Sums(np.ones((1, 32)), np.ones(1, np.int64))},
            datasets=[],
            chunks=1,
            chunk_size=1,
        )
    only_files(tmp_path)


# ---- files that lie


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({f"{NAME}.in_sum2": squares(64)}, "belong together"),
        ({f"{NAME}.counts": np.ones((1, 1), np.float32)}, "belong together"),
        ({"blk.0.weight": squares(64)}, "no importance of any tensor"),
        (pair(NAME, squares(64), np.ones(5)), "5 counts"),
        (pair(NAME, squares(64, 4), np.ones(3)), "3 counts"),
        (pair(NAME, -squares(64), np.ones(1)), "negative or not finite"),
        (pair(NAME, squares(64) * np.float32(np.nan), np.ones(1)), "negative or not finite"),
        (pair(NAME, squares(64), -np.ones(1)), "negative or not finite"),
        (pair(NAME, squares(64), np.array([np.inf])), "negative or not finite"),
        (pair(NAME, squares(64).astype(np.float16), np.ones(1)), "F32 is needed"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, tensors: dict[str, Array], why: str) -> None:
    with pytest.raises(GGUFError, match=why):
        load_imatrix(write_imatrix(tmp_path / "i.gguf", tensors))


def test_models_are_no_importance_matrices(tmp_path: Path) -> None:
    path = write_imatrix(tmp_path / "m.gguf", pair(NAME, squares(64), np.ones(1)), kind="model")
    with pytest.raises(GGUFError, match="no importance matrix"):
        load_imatrix(path)


# ---- the form before GGUF


def dat(entries: list[tuple[str, int, Array]], tail: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, values.size) + values.tobytes()
    return out + tail


def test_old_files_are_read(tmp_path: Path) -> None:
    a, b = squares(64)[0], squares(96, seed=3)[0]
    path = tmp_path / "imatrix.dat"
    path.write_bytes(dat([("a", 4, a), ("b", 0, b)], struct.pack("<ii", 4, 3) + b"txt"))
    got = load_imatrix(path)
    np.testing.assert_allclose(got["a"], a / 4, rtol=1e-6)
    np.testing.assert_allclose(got["b"], b, rtol=1e-6)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_of_either_form_give_one_error_or_numbers(tmp_path: Path, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        good = dat([("a", 4, squares(64)[0]), ("b", 2, squares(32)[0])])
    else:
        good = write_imatrix(tmp_path / "g.gguf", pair(NAME, squares(64), np.ones(1))).read_bytes()
    raw = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)):
        if raw:
            raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "bad"
    path.write_bytes(raw)
    try:
        got = load_imatrix(path)
    except GGUFError:
        return
    for values in got.values():
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
        assert (values >= 0).all()


def test_old_files_with_lying_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.dat"
    for raw in (
        b"",
        b"\1\0",
        struct.pack("<i", 1 << 30) + b"x" * 64,
        struct.pack("<i", -1) + b"x" * 64,
        struct.pack("<ii", 1, 1 << 30) + b"x" * 64,
        dat([("a", 1, squares(32)[0])] * 2),
        dat([("a", -1, squares(32)[0])]),
        dat([("a", 1, squares(32)[0])])[:-1],
    ):
        path.write_bytes(raw)
        with pytest.raises(GGUFError, match="neither an importance matrix"):
            load_imatrix(path)


# ---- collecting

CTX = 64
TEXT = "the question is what the answer of the first number is and how much more time it would take them to do so\n"


def run_imatrix(*args: object) -> subprocess.CompletedProcess[str]:
    return process_kit.run("tilebeam", "imatrix", *map(str, args))


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "m.gguf"
    return write_model(path, preset("tiny", type="f32", n_layer=2, tied=False, seed=9))


def test_collected_importance_is_the_mean_square_of_what_comes_in(model: Path, tmp_path: Path) -> None:
    """The first layer's inputs are a norm of the embeddings, the output matrix' a norm of what has no oracle here."""
    (tmp_path / "t.txt").write_text(TEXT * 20)
    out = tmp_path / "i.gguf"
    done = run_imatrix("-m", model, "-f", tmp_path / "t.txt", "-o", out, "-c", CTX, "--process-output", "--json")
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    got = load_imatrix(out)
    with GGUFFile(model) as f:
        values = {t.name: f.read(t.offset, t.nbytes).view(np.float32) for t in f.tensors.values()}
        shapes = {t.name: t.ne for t in f.tensors.values()}
    layers = {n for n in values if n.startswith("blk.") and not n.endswith("norm.weight")}
    assert {*got} == layers | {"output.weight"}
    assert about["tensors"] == len(got)
    for name, values_in in got.items():
        assert values_in.shape == (shapes[name][0],)
        assert (values_in > 0).all()
    tokenizer = LlamaTokenizer(model)
    ids = [1, *tokenizer((TEXT * 20).encode("utf-8").removesuffix(b"\n")).tolist()]
    tokenizer.close()
    ids = ids[: len(ids) // CTX * CTX]
    assert about["chunks"] == len(ids) // CTX > 3
    windows = np.array(ids).reshape(-1, CTX)
    windows[:, 0] = 1
    rows = values["token_embd.weight"].reshape(-1, shapes["token_embd.weight"][0])[windows.reshape(-1)]
    first = norm(rows.astype(np.float64), values["blk.0.attn_norm.weight"])
    for part in "qkv":
        np.testing.assert_allclose(got[f"blk.0.attn_{part}.weight"], (first**2).mean(axis=0), rtol=1e-4)
    np.testing.assert_array_equal(got["blk.1.ffn_up.weight"], got["blk.1.ffn_gate.weight"])
    counts = {t.name: t.data for t in gguf.GGUFReader(out).tensors if t.name.endswith(".counts")}
    assert {int(c.reshape(-1)[0]) for c in counts.values()} == {windows.size}


def fake_tensor(op: int, data: Array | None, name: str, ne: tuple[int, ...], sources: tuple[Any, ...] = ()) -> Any:
    from tilebeam.measure.graph_watch import Tensor

    t = Tensor(op=op, name=name.encode())
    shape = (*ne, 1, 1, 1)[:4]
    t.ne[:] = shape
    size = 4
    for i in range(4):
        t.nb[i] = size
        size *= shape[i]
    if data is not None:
        t.data = data.ctypes.data
    for i, s in enumerate(sources):
        t.src[i] = ctypes.pointer(s)
    return t


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_counted_by_the_tokens_routed_to_them(shared: bool) -> None:
    """MUL_MAT_ID: x [K, experts used (or 1), tokens], ids [experts used, tokens]."""
    from tilebeam.measure.graph_watch import operation
    from tilebeam.measure.imatrix import Collector

    rng = np.random.default_rng(3)
    k, n_experts, used, tokens = 32, 4, 2, 17
    x = rng.normal(size=(tokens, 1 if shared else used, k)).astype(np.float32)
    ids = np.stack([rng.permutation(3)[:used] for _ in range(tokens)]).astype(np.int32)  # expert 3 gets nothing
    collector = Collector()
    weight = fake_tensor(0, None, "CPU#blk.0.ffn_up_exps.weight#0", (k, 64, n_experts))
    tensors = (weight, fake_tensor(0, x, "x", (k, x.shape[1], tokens)), fake_tensor(0, ids, "ids", (used, tokens)))
    collector.add(fake_tensor(operation("MUL_MAT_ID"), None, "y", (64, used, tokens), tensors))
    got = collector.sums["blk.0.ffn_up_exps.weight"]
    assert got.counts.tolist() == [int((ids == e).sum()) for e in range(n_experts)]
    for e in range(n_experts):
        expected = sum(
            (
                x[t, 0 if shared else u].astype(np.float64) ** 2
                for t in range(tokens)
                for u in range(used)
                if ids[t, u] == e
            ),
            np.zeros(k),
        )
        np.testing.assert_allclose(got.squares[e], expected, rtol=1e-6)


def test_too_little_text_and_missing_files_are_one_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the question")
    for args, why in (
        (("-f", tmp_path / "t.txt", "-o", tmp_path / "o.gguf"), "need at least"),
        (("-f", tmp_path / "none.txt", "-o", tmp_path / "o.gguf"), "No such file"),
        (("-f", tmp_path / "t.txt", "-o", tmp_path / "no" / "o.gguf"), "no: No such file"),
    ):
        done = run_imatrix("-m", model, *args)
        assert done.returncode == 1
        assert why in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
    only_files(tmp_path, "t.txt")
