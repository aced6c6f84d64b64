"""The order of the packages: a package imports only packages to its left, and no modules import each other in a circle.

Every import statement counts, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "python" / "tilebeam"
ORDER = (
    *("_ext", "gguf", "base", "grammars", "native", "sandbox", "engine", "chat", "model", "answers", "scoring"),
    *("search", "pages", "measure", "evaluation", "training", "server", "cli"),
)
# The lazy face of the package and `python -m tilebeam` may name anything.
FACES = ("tilebeam", "tilebeam.__main__")


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The package of a module, one of ORDER."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / parts[1]).is_dir() else "base"


def imports() -> dict[str, set[str]]:
    """For each module of tilebeam, the modules of tilebeam that it names in an import."""
    files = {module_of(p): p for p in ROOT.rglob("*.py")} | {
        module_of(p): p for link in ("_ext", "gguf") for p in (ROOT / link).glob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        here = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                up = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*up, *([node.module] if node.module else [])])
                named |= {f"{base}.{a.name}" if f"{base}.{a.name}" in files else base for a in node.names}
        found[module] = {n for n in named if n in files and n != module}
    return found


def test_a_package_imports_only_packages_to_its_left() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in imports().items()
        if module not in FACES
        for name in names
        if name == "tilebeam" or ORDER.index(package_of(name)) > ORDER.index(package_of(module))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circles() -> None:
    graph = {m: names - {m.rpartition(".")[0]} for m, names in imports().items() if m not in FACES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_search_does_not_know_models() -> None:
    assert not [
        (m, n)
        for m, names in imports().items()
        for n in names
        if m.startswith("tilebeam.search") and n.startswith("tilebeam.model")
    ]
