"""The Python examples of README and docs/python.md run as pasted, on a small random model under the name they use, and
the commands that README and the first page show are taken by the program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_kit import with_metadata
from tilebeam.cli.main import app
from tilebeam.gguf import gguf_write as w
from typer.main import get_command

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
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
COMMANDS = sorted(
    {
        line
        for page in ("README", "docs/index")
        for block in re.findall(r"```\n(.*?)```", (ROOT / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in re.findall(r"^(?:\$ )?tilebeam (.+)", block, flags=re.MULTILINE)
    }
)


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMED)
def test_python_example(example: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base.gguf", SynthConfig(n_layer=2, type="q4_0"))
    key = "tokenizer.chat_template"
    with_metadata(base, tmp_path / "model.gguf", {key: w.kv_text(key, TEMPLATE)})
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", COMMANDS)
def test_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has these options, and names no file but the model and what a checkout has."""
    (tmp_path / "model.gguf").touch()
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    commands: Any = get_command(app)
    name, *words = shlex.split(line, comments=True)
    context = commands.commands[name].make_context(name, words)
    files = [v for k, v in context.params.items() if isinstance(v, Path) and k not in ("html", "out")]
    assert all(file.exists() for file in files), files


def test_there_are_examples() -> None:
    assert len(COMMANDS) >= 5
    assert sum(name.startswith("README") for name in NAMED) == 1
    assert len(EXAMPLES) >= 4


def test_examples_show_what_readers_look_for() -> None:
    """The answer of a vote, not only the text it is in; and streams that show their text at once, piped or not."""
    text = "\n".join(EXAMPLES)
    assert "vote.answer" in text
    assert "vote.votes" in text
    for printed in re.findall(r"print\(.*end=.*", text):
        assert "flush=True" in printed
