"""A random model in float32, and it loaded anew for every test."""

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
    return write_model(
        tmp_path_factory.mktemp("models") / "f32.gguf", preset("tiny", arch="llama", type="f32", n_layer=2)
    )


@pytest.fixture
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=2048, n_seq_max=8, threads=1, lookup=False, **EXACT) as model:
        yield model
