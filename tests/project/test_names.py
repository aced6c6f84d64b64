"""One name, one thing: no two classes or modules of the product share a name, but where one wraps the other."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("python/tilebeam", "gguf_tools", "ggml_ext")
# The command `tilebeam X` wraps the module X of one of these.
WRAPPED = ("python/tilebeam/measure", "python/tilebeam/evaluation", "gguf_tools")
EVERYWHERE = ("__init__", "__main__", "errors", "main")


def sources() -> list[Path]:
    """Source files, each once: the package holds links to the other two folders."""
    return sorted({path.resolve() for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")})


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert places
    twice = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(sorted(twice))


def test_no_module_name_occurs_twice() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        folders[path.stem].append(str(path.parent.relative_to(ROOT)))
    assert folders
    twice = {}
    for name, where in folders.items():
        wrapper = "python/tilebeam/cli" in where and len(where) == 2 and any(folder in WRAPPED for folder in where)
        if len(where) > 1 and name not in EVERYWHERE and not wrapper:
            twice[name] = where
    assert not twice
