"""The README's Python examples run as pasted, on a small random model under the name they use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib.synth import SynthConfig, write_model

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_python_example(example: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", SynthConfig(n_layer=2, type="q4_0"))
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def test_examples_show_what_readers_look_for() -> None:
    """The answer of a vote, not only the text it is in; and streams that show their text at once, piped or not."""
    text = "\n".join(EXAMPLES)
    assert "vote.answer" in text
    assert "vote.votes" in text
    for printed in re.findall(r"print\(.*end=.*", text):
        assert "flush=True" in printed
