"""A server with a random model and a reward model, and a client of it, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import LM, TokenReward

from bench.lib.synth import preset, write_model

if TYPE_CHECKING:
    from server_kit import Running

# Scheduling then never changes a text: see test_engine.py.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("server") / "tiny.gguf", preset("tiny", type="f32"))


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, lookup=False, **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def reward(path: Path) -> Iterator[TokenReward]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, lookup=False, **EXACT) as model:
        yield TokenReward(model, tag="?", good="1", bad="2")


@pytest.fixture(scope="module")
def server(lm: LM, reward: TokenReward) -> Iterator[Running]:
    from server_kit import running  # needs packages that the tests skip without

    with running(lm, reward=reward, max_body=1 << 16) as it:
        yield it


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client()
