"""bench/accuracy.py: its order of windows, and that it goes on where it was killed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tilebeam.native.control import control

from bench import accuracy
from bench.lib import accuracy_variants as variants
from bench.lib import synth

TEXT = "The sum of two and three is five. Nobody knows how many of them there were, or why.\n" * 20
N_CTX = 64


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with two small groups."""
    pytest.importorskip("matplotlib")
    groups = (
        variants.Group("small", variants.STOCK, (variants.COLUMN, variants.COLUMN_FP16), most=1),
        variants.Group("large", variants.SOURCE, (variants.COLUMN, variants.TILE, variants.COLUMN_FP16_EXACT)),
    )
    monkeypatch.setattr(accuracy, "LAYOUTS", replace(variants.LAYOUTS, groups=groups))
    monkeypatch.setattr(accuracy, "BLOCK", 1)
    yield accuracy
    control().configure(numerics="int8", softmax="table")


def test_spread_is_an_order_of_all(bench: Any) -> None:
    for n in (1, 2, 3, 17, 220):
        assert sorted(bench.spread(n)) == list(range(n))
    # Every beginning covers the text: among the first 20 of 220 there is one in each tenth.
    assert {i // 22 for i in bench.spread(220)[:20]} == set(range(10))


def test_the_bench_goes_on_where_it_was_killed(
    bench: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = synth.write_model(tmp_path / "source.gguf", synth.preset("tiny", n_layer=2, type="f16", arch="gemma3"))
    out = tmp_path / "out"
    arguments = ["accuracy.py", "--out", out, "-m", model, "-f", text, "-c", N_CTX, "--chunks", 3, "-t", 1, "--json"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    real = bench.measure
    calls: list[list[str]] = []
    limit = 2

    def killed(*args: Any, **options: Any) -> Any:
        if len(calls) == limit:
            raise KeyboardInterrupt
        calls.append([s.name for s in args[0]])
        return real(*args, **options)

    monkeypatch.setattr(bench, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    kept = {p: dict(np.load(p)) for p in (out / "scores").glob("*.npz")}
    assert len(kept) == 3
    calls.clear()
    limit = 99
    bench.main()
    assert len(calls) == 2  # the large group's last window, and the small group
    for path, before in kept.items():
        with np.load(path) as after:
            done = np.isfinite(before["nll"])
            assert done.sum() == 2 * 31
            assert np.isfinite(after["nll"]).sum() == 3 * 31
            for name in ("nll", "nll_base", "kld", "same_top"):
                assert np.array_equal(after[name][done], before[name][done])
    result = json.loads((out / "accuracy.json").read_text())
    small, large = result["groups"]
    assert [row["figures"]["n"] for row in small["rows"]] == [31, 31]
    assert [row["figures"]["n"] for row in large["rows"]] == [93, 93, 93]
    by_name = {row["variant"]: row["figures"] for row in large["rows"]}
    column, tile = by_name[variants.COLUMN.name], by_name[variants.TILE.name]
    for figure in (column, tile):
        assert 0 < figure["kld"]["value"] < 1
    questions = {row["question"]: row for row in result["pairs"]}
    pair = questions["tile against common groups (the paper's table 4)"]
    assert pair["log_ratio"]["value"] == pytest.approx(
        tile["log_ratio"]["value"] - column["log_ratio"]["value"], abs=1e-9
    )
    assert pair["log_ratio"]["stderr"] < tile["ppl"]["stderr"]
    assert "Q4_0 tile, int8" in (out / "accuracy.md").read_text()
    assert (out / "accuracy.png").stat().st_size > 1000
    calls.clear()
    bench.main()
    assert calls == []
    text.with_name("other.txt").write_text(TEXT + "more")
    monkeypatch.setattr(sys, "argv", [str(text.with_name("other.txt") if a == text else a) for a in arguments])
    with pytest.raises(ValueError, match="another model, text or context"):
        bench.main()


def test_ways_to_four_bits_are_compared_with_a_text_of_their_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    model = synth.write_model(tmp_path / "source.gguf", synth.preset("tiny", n_layer=1, type="f32", arch="qwen2"))
    calibration = tmp_path / "c.txt"
    calibration.write_text(TEXT * 4)
    out = tmp_path / "out"
    arguments = ["accuracy.py", "--out", out, "-m", model, "-f", text, "-c", N_CTX, "--chunks", 1, "-t", 1, "--json"]
    monkeypatch.setattr(sys, "argv", list(map(str, [*arguments, "--calibrate", calibration])))
    accuracy.main()
    (group,) = json.loads((out / "accuracy.json").read_text())["groups"]
    assert [row["variant"] for row in group["rows"]] == [v.name for v in variants.FOUR_BITS.groups[0].variants]
    assert all(0 < row["figures"]["kld"]["value"] < 1 for row in group["rows"])
    assert not list((out / "models").glob("*.calibration"))
    calibration.write_text(TEXT)
    with pytest.raises(ValueError, match="calibrated on another text"):
        accuracy.main()
