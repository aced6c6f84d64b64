"""bench.real.head_data on a collection that is made here: what heads must find, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tilebeam import TilebeamError

from bench.real import head_data

N_EMBD, PROBLEMS, SAMPLES, ROWS = 4, 60, 4, 2


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """Samples whose last hidden state tells whether they are right, in its first element alone."""
    rng = np.random.default_rng(1)
    lines = [json.dumps({"tilebeam_eval": 1})]
    states = rng.normal(0, 1, (PROBLEMS * SAMPLES * ROWS, 3 * N_EMBD + 6)).astype(np.float16)
    for problem in range(PROBLEMS):
        samples = []
        for sample in range(SAMPLES):
            right = int(rng.integers(2))
            end = (problem * SAMPLES + sample) * ROWS + ROWS - 1
            states[end - 1 : end + 1, 2 * N_EMBD] = 3 * right - 1.5
            samples.append({"correct": right, "states": ROWS, "text": "", "tokens": 5, "logprob": -1.0})
        lines.append(json.dumps({"unit": str(problem), "row": problem * SAMPLES * ROWS, "samples": samples}))
    (tmp_path / "head.jsonl").write_text("\n".join(lines) + "\n")
    states.tofile(tmp_path / "head.states")
    return tmp_path / "head"


def test_heads_find_what_the_states_tell(stem: Path) -> None:
    rows = list(head_data.curve(*head_data.opened(stem), draws=2))
    assert [r["problems"] for r in rows] == [20, 40] * len(head_data.HEADS)
    by_head = {(r["head"], r["problems"]): r for r in rows}
    assert by_head["last hidden state", 40]["all"] > 0.95
    assert by_head["last hidden state", 40]["within"] > 0.95
    assert by_head["no hidden state", 40]["all"] < 0.7
    text = "\n".join(head_data.table({"tiny": rows}))
    assert "| model | head | 20 problems | 40 problems |" in text
    assert text.count("| tiny |") == len(head_data.HEADS)


def test_a_collection_that_is_damaged_or_too_small_is_refused(stem: Path) -> None:
    records, states = head_data.opened(stem)
    with pytest.raises(TilebeamError, match="28 problems are too few"):
        next(head_data.curve(records[:28], states, draws=2))
    with open(f"{stem}.states", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(TilebeamError, match="does not have the rows"):
        head_data.opened(stem)
