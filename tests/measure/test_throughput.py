"""A runner that copies a shared prompt from another one's cache: the same cells, and none of its tokens decoded."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tilebeam
from tilebeam import LM, TilebeamError
from tilebeam.measure.throughput import Case, Runner
from tilebeam.native.llama import Context

from bench.lib.synth import preset, write_model

CASE = Case(n_gen=2, n_parallel=3, n_depth=40, shared=True)
LONGER = Case(n_gen=2, n_parallel=2, n_depth=60, shared=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "f32.gguf", preset("tiny", arch="llama", type="f32"))


def loaded(path: Path, device: str, **options: bool) -> LM:
    return tilebeam.load(path, device, n_ctx=256, n_seq_max=4, threads=1, **options)  # type: ignore[arg-type]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Context, int]]:
    found: list[tuple[Context, int]] = []
    real = Context.decode

    def decode(context: Context, n: int) -> int:
        found.append((context, n))
        return real(context, n)

    monkeypatch.setattr(Context, "decode", decode)
    return found


def test_a_prompt_is_copied(path: Path, sizes: list[tuple[Context, int]]) -> None:
    with loaded(path, "npu") as first, loaded(path, "cpu") as second, ExitStack() as stack:
        reader = Runner(first)
        copier = Runner(second, seed=1, reader=reader)
        for runner in (reader, copier):
            stack.enter_context(runner.keeping())
        for case in (CASE, LONGER, CASE):
            for runner in (reader, copier):
                runner.run(case)
                runner.run(case)
            of_prompt = []
            for lm in (first, second):
                assert lm.engine.context.truncate(0, case.n_depth)
                of_prompt.append(lm.engine.context.save_sequence(0))
            np.testing.assert_array_equal(*of_prompt)
        # Of three sequences, and of two.
        assert {n for context, n in sizes if context is second.engine.context} == {2, 3}
        assert {n for context, n in sizes if context is first.engine.context} == {2, 3, 20, 40}


def test_other_cells_are_refused(path: Path) -> None:
    with loaded(path, "npu") as first, loaded(path, "cpu", flash_attn=False) as second, ExitStack() as stack:
        reader = Runner(first)
        copier = Runner(second, reader=reader)
        for runner in (reader, copier):
            stack.enter_context(runner.keeping())
        reader.run(CASE)
        with pytest.raises(TilebeamError, match="cannot be copied"):
            copier.run(CASE)
