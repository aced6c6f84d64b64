"""The Python examples of README and docs/python.md run as pasted, on a small random model under the name they use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib.synth import SynthConfig, write_model

ROOT = Path(__file__).parents[2]
NAMED = {
    f"{page}-{i}": example
    for page in ("README", "docs/python")
    for i, example in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    )
}
EXAMPLES = list(NAMED.values())


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMED)
def test_python_example(example: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", SynthConfig(n_layer=2, type="q4_0"))
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert sum(name.startswith("README") for name in NAMED) == 1
    assert len(EXAMPLES) >= 4


def test_examples_show_what_readers_look_for() -> None:
    """The answer of a vote, not only the text it is in; and streams that show their text at once, piped or not."""
    text = "\n".join(EXAMPLES)
    assert "vote.answer" in text
    assert "vote.votes" in text
    for printed in re.findall(r"print\(.*end=.*", text):
        assert "flush=True" in printed
