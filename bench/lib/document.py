"""What benches write into documents, between two marks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path


def put_into(path: Path, name: str, text: str) -> None:
    """Replace what is between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a Markdown file.

    Raises:
        ValueError: the file has not exactly one of each, in this order.
    """
    marks = [f"<!-- {name}: {end} -->" for end in ("begin", "end")]
    whole = path.read_text(encoding="utf-8")
    before, _, rest = whole.partition(marks[0])
    _, _, after = rest.partition(marks[1])
    if any(whole.count(mark) != 1 for mark in marks) or marks[1] in before:
        raise ValueError(f"{path} has not one {marks[0]} and one {marks[1]} behind it")
    path.write_text(f"{before}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{after}", encoding="utf-8")


def evaluated(folder: Path, title: str, names: Mapping[str, str]) -> Iterator[str]:
    """Lines of the report.md that `tilebeam eval` left in a folder, as a section of a document without its plots.

    Args:
        names: of series, for people.
    """
    yield f"### {title}"
    for line in (folder / "report.md").read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("!["):
            continue
        cells = [names.get(cell.strip(" *"), cell.strip()) for cell in line.split("|")]
        yield " | ".join(cells).strip() if line.startswith("|") else re.sub("^##", "####", line)


def plots(folder: Path, title: str, prefix: str, document: Path) -> Iterator[str]:
    """Copy an evaluation's plots beside a document; lines that show them."""
    for name in ("accuracy", "latency"):
        if (plot := folder / f"{name}.png").exists():
            target = document.with_name(f"{prefix}-{name}.png")
            shutil.copy(plot, target)
            yield from ("", f"![{title}, {name}]({target.name})")
