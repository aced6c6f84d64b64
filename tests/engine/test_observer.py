"""An observer hears of every phase of every step, in order and in the thread that did it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tilebeam
from engine_kit import equal_logits
from tilebeam import SamplingParams
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.observer import Phase
from tilebeam.engine.request import Sample
from tilebeam.native.llama import Context


class Ear:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Phase, int, int]] = []
        self.threads: set[int] = set()

    def phase(self, name: Phase, begin_ns: int, end_ns: int) -> None:
        self.heard.append((name, begin_ns, end_ns))
        self.threads.add(threading.get_ident())


def test_phases_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True)
    with tilebeam.load(equal_logits(tmp_path / "m.gguf"), "cpu", n_ctx=256, n_seq_max=2, threads=1, lookup=False) as lm:
        lm.generate([5, 6, 7], params)
        ear = Ear()
        lm.observe(ear)
        lm.generate([5, 6, 7], params)
        steps = [i for i, (name, _, _) in enumerate(ear.heard) if name == "step"]
        names = [name for name, _, _ in ear.heard]
        # The prompt, a batch that is planned, and batches with the same plan; a step is told of when it ends.
        planned, again = ["plan", "decode", "sample", "step"], ["decode", "sample", "step"]
        assert names == planned + planned + again * 3
        assert ear.threads == {threading.get_ident()}
        for first, last in zip([0, *[i + 1 for i in steps]], steps, strict=False):
            _, begin, end = ear.heard[last]
            inside = ear.heard[first:last]
            assert all(begin <= b <= e <= end for _, b, e in inside)
            assert all(a[2] <= b[1] for a, b in pairwise(inside))
        ear.heard.clear()
        lm.logits([5, 6])
        assert [name for name, _, _ in ear.heard] == ["decode"]

        def broken(_context: Context, _n: int) -> int:
            raise KeyboardInterrupt

        ear.heard.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", broken)
            with pytest.raises(KeyboardInterrupt):
                lm.generate([5], params)
        assert [name for name, _, _ in ear.heard] == ["plan", "step"]
        lm.observe(None)
        ear.heard.clear()
        lm.generate([5, 6, 7], params)
        assert ear.heard == []
        assert lm.engine.context.on_decode is None


def test_guesses_and_their_checks_are_phases(tmp_path: Path) -> None:
    class Sevens(Drafter):
        def propose(self, asked: Sequence[tuple[Sample, int]], _rows: int) -> list[list[int]]:
            return [[7] for _ in asked]

    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    with tilebeam.load(equal_logits(tmp_path / "m.gguf"), "cpu", n_ctx=256, n_seq_max=2, threads=1) as lm:
        lm.use_drafter(Sevens())
        ear = Ear()
        lm.observe(ear)
        lm.generate([5, 6, 7], params)
        names = [name for name, _, _ in ear.heard]
        drafted = ["draft", "plan", "decode", "verify", "sample", "step"]
        assert names == ["plan", "decode", "sample", "step", *drafted, *drafted, "plan", "decode", "sample", "step"]
