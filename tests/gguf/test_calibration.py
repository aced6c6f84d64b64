"""gguf-repack --calibrate: second moments of a text, what is made of them, runs that are stopped, and bad input."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import process_kit
import pytest
from gguf_kit import only_files
from tilebeam.cli.repack import calibration
from tilebeam.gguf import GGUFError, cli, pack, unpack, verify
from tilebeam.gguf.calibration import Calibration
from tilebeam.gguf.compensate import damped
from tilebeam.gguf.policy import Policy
from tilebeam.gguf.repack import Report
from tilebeam.measure.moments import collect_moments
from tilebeam.measure.perplexity import windows_of
from tilebeam.model.loader import load

from bench.lib.synth import preset, write_model

Array = np.ndarray[Any, np.dtype[Any]]
SHAPE = {"n_embd": 128, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 192}
TEXT = "the question is what the answer of the first number is and how much more time it would take them to do so\n"
MATRICES = tuple(
    f"blk.{layer}.{part}.weight"
    for layer in (0, 1)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "m.gguf"
    return write_model(path, preset("tiny", type="f32", n_layer=2, tied=True, seed=9, **SHAPE))


@pytest.fixture(scope="module")
def moments(model: Path) -> dict[str, Array]:
    with load(model, device="cpu", n_ctx=256, n_seq_max=1, threads=1) as lm:
        return collect_moments(lm, windows_of(lm, TEXT * 60, 256, 4), MATRICES, threads=1)


def values(path: Path) -> dict[str, Array]:
    """All tensors as the gguf package reads them."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def given(moments: Mapping[str, Array], **options: Any) -> Calibration:
    return Calibration(lambda names: {n: moments[n] for n in names if n in moments}, {"text": "t"}, **options)


def quantized(model: Path, out: Path, type: str = "q4_0", **options: Any) -> Report:
    """An ordinary file whose matrices have one type; the embeddings stay."""
    tiles = out.with_suffix(".tiles")
    report = pack(model, tiles, policy=Policy.make(type=type, output_weight="runtime"), **options)
    unpack(tiles, out)
    tiles.unlink()
    return report


def cost(w: Array, v: Array, h: Array) -> float:
    left = w.astype(np.float64) - v
    return float(np.einsum("nk,nk->", left @ h, left))


# ---- collecting


def test_moments_are_those_of_the_inputs(model: Path, moments: dict[str, Array]) -> None:
    """The first layer's inputs are a norm of the embeddings."""
    assert set(moments) == set(MATRICES)
    for layer in (0, 1):
        q, k, v, gate, up = (
            moments[f"blk.{layer}.{p}.weight"] for p in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        )
        assert q is k
        assert q is v
        assert gate is up
    with load(model, device="cpu", n_ctx=256, n_seq_max=1, threads=1) as lm:
        windows = windows_of(lm, TEXT * 60, 256, 4)
    for name in MATRICES:
        np.testing.assert_array_equal(moments[name], moments[name].T)
    tensors = values(model)
    tokens = np.concatenate([windows.inputs(i) for i in range(len(windows))])
    rows = tensors["token_embd.weight"][tokens].astype(np.float64)
    rows *= tensors["blk.0.attn_norm.weight"] / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = rows.T @ rows
    np.testing.assert_allclose(moments["blk.0.attn_q.weight"], expected, atol=1e-4 * expected.diagonal().max())


def test_layers_behind_the_last_wanted_one_are_not_computed(model: Path, moments: dict[str, Array]) -> None:
    from tilebeam.measure import graph_watch
    from tilebeam.measure.moments import MomentCollector

    seen: list[str] = []

    class Watched(MomentCollector):
        def wants(self, t: Any) -> bool:
            if t.op == self._mul_mat:
                seen.append(self._name(t.src[0].contents))
            return super().wants(t)

    collector = Watched(wanted=frozenset({"blk.0.ffn_gate.weight"}))
    with load(model, device="cpu", n_ctx=256, n_seq_max=1, threads=1) as lm:
        windows = windows_of(lm, TEXT * 60, 256, 1)
        graph_watch.decode(lm, windows, collector, threads=1)
    np.testing.assert_allclose(
        collector.moments["blk.0.ffn_gate.weight"].trace() * 4, moments["blk.0.ffn_gate.weight"].trace(), rtol=0.3
    )
    assert "blk.0.attn_q.weight" in seen
    assert "output.weight" not in seen


# ---- quantizing


@pytest.mark.parametrize("type", ["q4_0", "iq4_nl", "q8_0"])
def test_every_matrix_is_closer_in_its_results_than_by_rounding(
    model: Path, moments: dict[str, Array], tmp_path: Path, type: str
) -> None:
    plain, made = tmp_path / "p.gguf", tmp_path / "c.gguf"
    quantized(model, plain, type, search=True)
    report = quantized(model, made, type, calibration=given(moments))
    assert not any("not calibrated" in note for note in report.notes)
    only_files(tmp_path, "p.gguf", "c.gguf")
    w, a, b = values(model), values(plain), values(made)
    for name in MATRICES:
        h = damped(moments[name])
        assert cost(w[name], b[name], h) < 0.9 * cost(w[name], a[name], h), name
    assert {t.name: t.tensor_type for t in gguf.GGUFReader(made).tensors} == {
        t.name: t.tensor_type for t in gguf.GGUFReader(plain).tensors
    }
    np.testing.assert_array_equal(w["token_embd.weight"], b["token_embd.weight"])


@pytest.mark.parametrize("grouping", ["column", "tile"])
def test_calibrated_files_verify(model: Path, moments: dict[str, Array], tmp_path: Path, grouping: str) -> None:
    policy = Policy.make(type="q4_0", grouping=grouping, output_weight="runtime")
    pack(model, tmp_path / "t.gguf", policy=policy, calibration=given(moments))
    assert verify(tmp_path / "t.gguf", against=model).against


def test_matrices_that_the_text_says_nothing_of_get_searched_scales(
    model: Path, moments: dict[str, Array], tmp_path: Path
) -> None:
    some = {n: h for n, h in moments.items() if n.startswith("blk.0")}
    report = quantized(model, tmp_path / "c.gguf", calibration=given(some))
    assert "7 of the quantized tensors are not calibrated" in report.notes[-1]
    quantized(model, tmp_path / "s.gguf", search=True)
    a, b = values(tmp_path / "c.gguf"), values(tmp_path / "s.gguf")
    assert all(np.array_equal(a[n], b[n]) == (n not in some) for n in MATRICES)


# ---- runs that are stopped


def test_a_stopped_run_asks_only_for_what_is_missing(model: Path, moments: dict[str, Array], tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def interrupted(most: int) -> Calibration:
        def collected(names: Sequence[str]) -> dict[str, Array]:
            asked.append(names)
            if len(asked) > most:
                raise KeyboardInterrupt
            return {n: moments[n] for n in names}

        return Calibration(collected, {"text": "t"}, memory=max(4 * h.size for h in moments.values()))

    whole, out = tmp_path / "w.gguf", tmp_path / "o.gguf"
    options: dict[str, Any] = {"policy": Policy.make(type="q4_0", output_weight="runtime")}
    pack(model, whole, calibration=given(moments), **options)
    with pytest.raises(KeyboardInterrupt):
        pack(model, out, calibration=interrupted(1), **options)
    assert not out.exists()
    assert len(asked) == 2
    again = list(asked)
    asked.clear()
    pack(model, out, calibration=interrupted(9), **options)
    assert set(asked[0]) == set(again[1])
    assert not set(again[0]) & {n for names in asked for n in names}
    assert out.read_bytes() == whole.read_bytes()
    only_files(tmp_path, "w.gguf", "o.gguf")


def test_what_is_kept_belongs_to_one_text_and_one_source(
    model: Path, moments: dict[str, Array], tmp_path: Path
) -> None:
    def stop(_names: Sequence[str]) -> dict[str, Array]:
        raise KeyboardInterrupt

    out = tmp_path / "o.gguf"
    with pytest.raises(KeyboardInterrupt):
        pack(model, out, type="q4_0", calibration=Calibration(stop, {"text": "a"}))
    only_files(tmp_path)  # nothing was done: nothing is kept
    folder = tmp_path / "o.gguf.calibration"
    folder.mkdir()
    (folder / "setting.json").write_text("{}")
    (folder / "x.tiles").write_bytes(b"1")
    with pytest.raises(GGUFError, match="another source or text"):
        pack(model, out, type="q4_0", calibration=given(moments))


def repack(*words: str | Path) -> int:
    """The command in this process; its exit status."""
    try:
        return cli.run(lambda: cli.app([*map(str, words)], obj=calibration))
    except SystemExit as e:
        return int(str(e.code))


def command(model: Path, text: Path, out: Path, *more: str) -> list[str | Path]:
    options = ["--type", "q4_0", "--output-weight", "runtime", "--calibrate-chunks", "2", "--calibrate-memory", "1"]
    return ["pack", model, out, *options, "--calibrate", text, "--threads", "1", *more]


def test_a_killed_command_is_resumed_by_the_same_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "o.gguf"
    text.write_text(TEXT * 60)
    running = process_kit.start("gguf-repack", *command(model, text, out))
    folder = tmp_path / "o.gguf.calibration"
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.tiles")) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert repack(*command(model, text, out, "--force", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["n_requantized"] == len(MATRICES)
    assert repack(*command(model, text, tmp_path / "w.gguf")) == 0
    assert (tmp_path / "w.gguf").read_bytes() == out.read_bytes()
    only_files(tmp_path, "t.txt", "o.gguf", "w.gguf")


# ---- bad input


def test_texts_and_models_that_do_not_do(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text(TEXT)
    long.write_text(TEXT * 60)
    small = write_model(tmp_path / "q4.gguf", preset("tiny", type="q4_0", n_layer=1))
    for source, text, more, why, status in (
        (model, short, (), "windows of 512 need at least 1024", 1),
        (model, tmp_path / "none.txt", (), "No such file", 1),
        (small, long, (), "no matrix that a calibration could quantize", 1),
        (model, long, ("--calibrate-chunks", "0"), "at least 1 window", 2),
    ):
        assert repack(*command(source, text, tmp_path / "o.gguf", *more)) == status
        assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
    only_files(tmp_path, "short.txt", "long.txt", "q4.gguf")


@pytest.mark.parametrize(
    ("change", "why"), [(lambda h: h * np.float32(np.nan), "not finite"), (lambda h: h * 0, "all its inputs are 0")]
)
def test_moments_that_make_no_sense_name_the_tensor(
    model: Path, moments: dict[str, Array], tmp_path: Path, change: Callable[[Array], Array], why: str
) -> None:
    bad = moments | {"blk.1.ffn_down.weight": change(moments["blk.1.ffn_down.weight"])}
    with pytest.raises(GGUFError, match=f"'blk.1.ffn_down.weight'.*{why}"):
        pack(model, tmp_path / "o.gguf", type="q4_0", calibration=given(bad))
    assert not (tmp_path / "o.gguf").exists()


def test_importance_and_calibration_exclude_each_other(model: Path, moments: dict[str, Array], tmp_path: Path) -> None:
    importance = {n: h.diagonal() for n, h in moments.items()}
    with pytest.raises(ValueError, match="choose one"):
        pack(model, tmp_path / "o.gguf", type="q4_0", importance=importance, calibration=given(moments))
