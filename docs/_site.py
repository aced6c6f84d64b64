"""Hooks of mkdocs: pages of the site that lie outside of docs/, and links between them and those inside.

The documents link to each other by their places in the repository, so that they can be read there.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Their names on the site.
OUTSIDE = {
    "bench/RESULTS.md": "RESULTS.md",
    "bench/tiny/README.md": "tiny-training.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
# [text](target#anchor), but for addresses and for anchors of the same page.
LINK = re.compile(r"\[([^\[\]]*)\]\((?![\w+.-]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between places in the repository into links between pages; one to a file that is no page becomes its
    text. A link that leads nowhere stays, and mkdocs names it."""
    places = {name: path for path, name in OUTSIDE.items()}
    folder = PurePosixPath(places.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], normpath(f"{folder}/{found[2]}"), found[3] or ""
        if target in OUTSIDE:
            return f"[{text}]({OUTSIDE[target]}{anchor})"
        if target.startswith("docs/") and (ROOT / target).exists():
            return f"[{text}]({target.removeprefix('docs/')}{anchor})"
        return text if (ROOT / target).exists() else found[0]

    return LINK.sub(linked, markdown)
