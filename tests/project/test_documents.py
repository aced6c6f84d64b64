"""Documents name files that exist."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "backend|bench|docs|ggml_ext|gguf_tools|python|tests"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./{{}},<>*-]*)")
MODULE = re.compile(r"python -m (bench(?:\.[a-z_]+)+)")


def documents() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")]


def alternatives(path: str) -> list[str]:
    """Paths with `{a,b}` written out."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(parts) for parts in itertools.product(*choices)]


@pytest.mark.parametrize("document", documents())
def test_paths_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = {p for found in PATH.findall(text) for p in alternatives(found.rstrip(".,")) if not re.search("[<>*]", p)}
    named |= {module.replace(".", "/") for module in MODULE.findall(text)}
    missing = [p for p in sorted(named) if not ((ROOT / p).exists() or (ROOT / f"{p}.py").exists())]
    assert not missing


def test_braces_are_written_out() -> None:
    assert alternatives("a/{b,c}.h") == ["a/b.h", "a/c.h"]
    assert alternatives("plain") == ["plain"]
