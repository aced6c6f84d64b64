"""Small random models for tests of several devices, and what must not stay behind after them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tilebeam import SamplingParams
from tilebeam import gguf as gguf_tools
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

KIB = 1024
PROMPT = "the question is how many times two plus two is less than ten"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 2, "n_batch": 32}
VOCAB = 8000  # the output matrix is then as large as all layers together
MODELS: dict[str, dict[str, Any]] = {
    "ordinary": {"arch": "llama", "type": "q4_0"},
    "tied": {"arch": "gemma3", "type": "q8_0"},
    "float output": {"arch": "qwen2", "type": "iq4_nl", "types": {"output": "f16"}},
}


def write_files(folder: Path) -> dict[str, Path]:
    """The models, and "repacked": the ordinary one as tiles."""
    found = {
        name: write_model(folder / f"{i}.gguf", preset("tiny", n_vocab=VOCAB, **changes))
        for i, (name, changes) in enumerate(MODELS.items())
    }
    found["repacked"] = folder / "repacked.gguf"
    gguf_tools.pack(found["ordinary"], found["repacked"])
    return found


def held() -> tuple[Any, ...]:
    """What the devices hold: buffers, their bytes, tiled tensors, spoilt buffers, and the sessions that run."""
    status = control().status()
    alive = [d["name"] for d in control().devices() if d["session"] == "alive"]
    return status["buffers"], status["buffer_bytes"], status["tiled_tensors"], status["bad_buffers"], alive


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = held()
    yield
    assert held() == before
