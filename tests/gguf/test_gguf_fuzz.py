"""What coverage-guided fuzzing of the GGUF reader kept (``tests/fuzz/repack.py``), replayed; and random edits of it."""

from __future__ import annotations

from pathlib import Path

import gguf_fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CORPUS = sorted((Path(__file__).parents[1] / "fuzz" / "gguf_corpus").iterdir())
SEEDS = gguf_fuzz.seeds()


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_inputs_that_fuzzing_found(path: Path, tmp_path: Path) -> None:
    gguf_fuzz.check(path.read_bytes(), tmp_path)


def test_seeds_get_as_far_as_they_should(tmp_path: Path) -> None:
    assert [gguf_fuzz.check(data, tmp_path) for data in SEEDS] == [
        "packed",
        "packed",
        "packed",
        "quantized",
        "packed",
        "refused",  # one part of two
        "repacked",
        "repacked",
    ]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.sampled_from(SEEDS),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.floats(0.5, 1),
)
def test_edited_files(seed: bytes, edits: list[tuple[float, bytes]], cut: float) -> None:
    data = bytearray(seed)
    for share, new in edits:
        at = int(share * len(data))
        data[at : at + len(new)] = new
    with gguf_fuzz.scratch() as folder:
        gguf_fuzz.check(bytes(data[: int(cut * len(data)) + 1]), Path(folder))
