"""Importance matrices: files as llama.cpp writes them, both forms, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_kit import Q, writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam.gguf.errors import GGUFError
from tilebeam.gguf.gguf_file import TensorInfo
from tilebeam.gguf.imatrix_file import importance_of, load_imatrix

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
