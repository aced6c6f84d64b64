"""Tables that benches write into documents, between two marks."""

from __future__ import annotations

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
