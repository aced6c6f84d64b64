"""The C declarations that cffi sees: the parts of the contract headers between their cffi marks.

The headers are the single text of the contract; nothing is written twice. ``python/tilebeam`` uses the same reader for
its own header, see :func:`declarations`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

BEGIN, END = "// cffi: begin", "// cffi: end"
INCLUDE = Path(__file__).parent / "include" / "tilebeam"
HEADERS = ("types.h", "layout.h", "quantize.h", "ops.h", "protocol.h", "trace.h")


def declarations(headers: Iterable[Path]) -> str:
    """Return what cffi's ``cdef`` takes: the marked parts of ``headers``, in order.

    Raises:
        ImportError: a header is missing or has no marked part (a broken installation).
    """
    parts = []
    for header in headers:
        try:
            text = header.read_text(encoding="utf-8")
        except OSError as e:
            raise ImportError(f"tilebeam: the header {header.name} is missing from the installation ({e})") from e
        found = re.findall(re.escape(BEGIN) + r"\n(.*?)" + re.escape(END), text, re.DOTALL)
        if not found:
            raise ImportError(f"tilebeam: the header {header.name} has no part marked for cffi")
        parts.extend(found)
    return "\n".join(parts)


def contract() -> str:
    """Return the declarations of types, layout, quantizer, ops, protocol and trace."""
    return declarations(INCLUDE / name for name in HEADERS)
