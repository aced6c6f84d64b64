"""Documents name files, headings, variables and public names that exist, and all of them."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import tilebeam
from tilebeam.native.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "backend|bench|docs|ggml_ext|gguf_tools|python|tests"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./{{}},<>*-]*)")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
# Most lines of pages that have to stay short.
SHORT = {"README.md": 120, "CHANGELOG.md": 80, "bench/RESULTS.md": 350}
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


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [
        re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    return {h if (n := headings[:i].count(h)) == 0 else f"{h}-{n}" for i, h in enumerate(headings)}


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong = []
    for target, anchor in LINK.findall(text):
        path = (ROOT / document).parent / target if target else ROOT / document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert not wrong


def test_short_pages_stay_short() -> None:
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in SHORT}
    assert {name: n for name, n in lines.items() if n > SHORT[name]} == {}


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w.-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {p.name for p in (ROOT / "docs").glob("*.md")} <= listed


def test_every_environment_variable_is_told() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(TILEBEAM_\w+)`", page, re.MULTILINE)) == set(VARIABLES)


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: tilebeam\.(\w+)$", page, re.MULTILINE)) == set(tilebeam.__all__) - {"__version__"}
