"""A random model in float32, and one loaded of it for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import LM

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat") / "tiny.gguf", preset("tiny", type="f32"))


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, lookup=False, **EXACT) as model:
        yield model
