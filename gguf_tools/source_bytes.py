"""The check that unpacking a lossless packing can give the very bytes of its source, or only the same contents.

`unpack` writes one GGUF with zeros as padding and nothing behind its last tensor. Other bytes of a source are in no
digest and are not kept.
"""

from __future__ import annotations

from . import gguf_write as w
from .gguf_file import GGUFFile
from .split import Source


def difference(f: Source) -> str | None:
    """Say why unpacking what is packed from this source gives another file with the same contents.

    Returns:
        The end of a sentence ("the source has .."), None if unpacking gives the very same bytes.
    """
    if not isinstance(f, GGUFFile):
        return "the source is split, and unpacking gives one file"
    names = [(t.name, t.type, t.ne) for t in f.tensors.values()]
    head, _, size = w.header(f.version, (kv.raw for kv in f.kv.values()), names, f.alignment)
    if f.size > size:
        return f"the source has {f.size - size} bytes after its last tensor"
    if f.size < size:
        return "the source ends without the padding of its last tensor"
    for at, n in f.padding():
        if f.read(at, n).any():
            return f"the source has nonzero bytes in its padding (at byte {at})"
    if f.read(0, len(head)).tobytes() != head:
        return "the source's header is encoded differently"
    return None
