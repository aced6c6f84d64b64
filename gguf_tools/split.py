"""Split models: the parts NAME-00001-of-0000N.gguf that llama-gguf-split writes, read as one GGUF.

The first part has all metadata, every part has its own tensors. Any of the parts may be named. What is made of a split
model is one file, without the ``split.*`` keys.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from .closing import Closing
from .errors import GGUFError
from .gguf_file import Bytes, GGUFFile, KeyValue, TensorInfo, value_of

PREFIX = "split."
K_NUMBER, K_COUNT, K_TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = 4096
NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_count(f: GGUFFile) -> int:
    """Count the files of the model that ``f`` belongs to. Raises GGUFError if it says so in no sensible way."""
    count = value_of(f.kv, K_COUNT)
    if count in (None, 0, 1):
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_PARTS:
        raise GGUFError(f"{f.path}: {K_COUNT} is {count!r}")
    return count


class SplitFile(Closing):
    """All parts of a split model as one file: the interface of :class:`GGUFFile`, as far as packing needs it.

    Attributes:
        kv: the first part's metadata without ``split.*``.
        tensors: of all parts, in order; ``TensorInfo.part`` says which.
        size: bytes of all parts.
    """

    def __init__(self, named: GGUFFile) -> None:
        """``named``: any of the parts. It is not kept open."""
        self.path, count = named.path, part_count(named)
        found = NAME.fullmatch(named.path.name)
        if found is None or int(found["count"]) != count:
            raise GGUFError(
                f"{named.path} is one of {count} parts of a model, but is not called NAME-00001-of-{count:05}.gguf: "
                "give the parts back their names"
            )
        paths = [named.path.with_name(f"{found['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
        missing = [p for p in paths if not p.exists()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise GGUFError(f"{named.path} is one of {count} parts of a model, and {missing[0]}{more} is missing")
        with ExitStack() as stack:
            self.parts = [stack.enter_context(GGUFFile(p)) for p in paths]
            self._check()
            self._stack = stack.pop_all()

    def _check(self) -> None:
        first = self.parts[0]
        tensors: dict[str, TensorInfo] = {}
        for i, part in enumerate(self.parts):
            if value_of(part.kv, K_NUMBER) != i or part_count(part) != len(self.parts):
                raise GGUFError(f"{part.path} does not say that it is part {i + 1} of {len(self.parts)}")
            for t in part.tensors.values():
                if t.name in tensors:
                    raise GGUFError(f"{part.path}: tensor {t.name!r} occurs in another part, too")
                tensors[t.name] = TensorInfo(t.name, t.type, t.ne, t.offset, t.nbytes, i)
        total = value_of(first.kv, K_TENSORS)
        if total is not None and total != len(tensors):
            raise GGUFError(f"{first.path}: the model has {total} tensors, its parts {len(tensors)}")
        self.tensors = tensors
        self.kv: dict[str, KeyValue] = {key: kv for key, kv in first.kv.items() if not key.startswith(PREFIX)}
        self.alignment, self.version, self.architecture = first.alignment, first.version, first.architecture
        self.size = sum(part.size for part in self.parts)

    def close(self) -> None:
        """Close all parts. Idempotent."""
        self._stack.close()

    def read_tensor(self, t: TensorInfo, at: int, out: Bytes) -> None:
        """Fill ``out`` with a tensor's bytes from its byte ``at`` on."""
        self.parts[t.part].read_tensor(t, at, out)

    def require_unchanged(self) -> None:
        """Raise GGUFError if a part was written to since it was opened."""
        for part in self.parts:
            part.require_unchanged()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The parts."""
        return tuple(part.path for part in self.parts)


Source = GGUFFile | SplitFile


def open_gguf(path: str | os.PathLike[str]) -> Source:
    """Open a GGUF file, or the whole of the split model that it is a part of; close it, or use it in ``with``.

    Raises:
        GGUFError: it is damaged, or a part is missing or does not belong to the others.
        OSError: a file cannot be opened or read.
    """
    f = GGUFFile(path)
    try:
        if part_count(f) == 1:
            return f
        whole = SplitFile(f)
    except BaseException:
        f.close()
        raise
    f.close()
    return whole
