"""The heat map of quantization errors: the errors against numpy's, and where the picture shows them."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from gguf_kit import only_files, writer
from tilebeam import gguf as gguf_tools
from tilebeam.gguf.errors import GGUFError
from tilebeam.gguf.heat_map import figure, heat_map, relative_errors, table

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32, in Q4_0, packed as it is, and packed in tile groups."""
    folder = tmp_path_factory.mktemp("heat")
    write_model(folder / "f32.gguf", preset("tiny", type="f32", tied=False, n_layer=2))
    gguf_tools.convert(folder / "f32.gguf", folder / "q4.gguf", type="q4_0")
    gguf_tools.pack(folder / "q4.gguf", folder / "q4.tb.gguf")
    return folder


def values(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf_dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def test_errors_are_those_of_the_dequantized_values(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    got = relative_errors(folder / "q4.gguf", folder / "f32.gguf", threads=2, progress=lambda *at: seen.append(at))
    x, y = values(folder / "f32.gguf"), values(folder / "q4.gguf")
    assert {*got} == {n for n in x if x[n].ndim > 1}
    for name, error in got.items():
        a = x[name].astype(np.float64)
        assert error == pytest.approx(np.sqrt(((a - y[name]) ** 2).sum() / (a**2).sum()), rel=1e-6)
        assert 0.03 < error < 0.15
    assert seen[-1][0] == seen[-1][1] > 0
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)


def test_tiles_have_the_error_of_the_blocks_they_hold(folder: Path) -> None:
    assert relative_errors(folder / "q4.tb.gguf", folder / "f32.gguf") == pytest.approx(
        relative_errors(folder / "q4.gguf", folder / "f32.gguf"), rel=1e-9
    )
    assert set(relative_errors(folder / "q4.tb.gguf", folder / "q4.gguf").values()) == {0.0}


def test_files_that_cannot_be_compared_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="compare with the file that was packed"):
        relative_errors(folder / "q4.gguf", folder / "q4.tb.gguf")
    write_model(tmp_path / "wide.gguf", preset("tiny", type="f32", n_ff=1024, n_layer=2))
    with pytest.raises(GGUFError, match=r"'blk.0.ffn_gate.weight' is \[256, 512\]"):
        relative_errors(folder / "q4.gguf", tmp_path / "wide.gguf")
    with writer(tmp_path / "other.gguf") as w:
        w.add_tensor("other.weight", np.ones((32, 32), np.float32))
    with pytest.raises(GGUFError, match="no weight matrix in common"):
        relative_errors(folder / "q4.gguf", tmp_path / "other.gguf")


def test_the_table_has_layers_down_and_kinds_across() -> None:
    rows, columns, cells = table(
        {
            "output.weight": 0.5,
            "blk.10.ffn_down.weight": 0.4,
            "blk.2.attn_q.weight": 0.3,
            "blk.2.other.thing.weight": 0.2,
            "blk.10.attn_q.weight": 0.0,
        }
    )
    assert rows == ["2", "10", "model"]
    assert columns == ["attn_q", "ffn_down", "other.thing", "output"]
    nan = np.nan
    expected = [[0.3, nan, 0.2, nan], [0.0, 0.4, nan, nan], [nan, nan, nan, 0.5]]
    np.testing.assert_array_equal(cells, expected)


def test_the_picture_shows_every_error_in_its_place(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    errors = {"blk.0.attn_q.weight": 0.01, "blk.1.attn_q.weight": 0.1, "blk.0.ffn_up.weight": 0.0}
    fig = figure(errors, "a title")
    axes = fig.axes[0]
    exact, shown = (image.get_array().filled(np.nan) for image in axes.images)
    np.testing.assert_allclose(shown, [[1, np.nan], [10, np.nan]])
    np.testing.assert_array_equal(exact, [[np.nan, 0], [np.nan, np.nan]])
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == {((0, 0), "1"), ((0, 1), "10"), ((1, 0), "0")}
    assert [t.get_text() for t in axes.get_xticklabels()] == ["attn_q", "ffn_up"]
    assert axes.get_title() == "a title"
    heat_map(errors, tmp_path / "h.png", title="a title")
    raw = (tmp_path / "h.png").read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    assert raw.startswith(b"\x89PNG")
    assert min(width, height) > 100
    only_files(tmp_path, "h.png")
    with pytest.raises(GGUFError, match="no weight matrix"):
        figure({}, "nothing")
    heat_map({"blk.0.attn_q.weight": 0.0}, tmp_path / "exact.png", title="all exact")
    assert (tmp_path / "exact.png").stat().st_size > 1000
    with pytest.raises(FileNotFoundError):
        heat_map(errors, tmp_path / "none" / "h.png", title="")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"] + ["matplotlib", "matplotlib.colors"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(GGUFError, match=r"pip install matplotlib"):
        heat_map({"blk.0.attn_q.weight": 0.1}, tmp_path / "h.png", title="")
    only_files(tmp_path)
