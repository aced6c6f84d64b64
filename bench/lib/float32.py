"""The weights of a model in float32: what nothing that rounds can be nearer to than the model itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write as w
from tilebeam.gguf.gguf_file import Q
from tilebeam.gguf.weights import is_weight, tensor_values


def in_float32(source: Path, target: Path) -> Path:
    """Write an ordinary GGUF with another's values, all its matrices and tables in F32."""
    with gguf_tools.open_gguf(source) as f:
        types = {t.name: Q.F32 if is_weight(t) else t.type for t in f.tensors.values()}
        names = [(t.name, types[t.name], t.ne) for t in f.tensors.values()]
        head, offsets, size = w.header(f.version, (kv.raw for kv in f.kv.values()), names, f.alignment)
        with w.complete_file(target, size, sources=f.paths) as out:
            out.write(head)
            for t, offset in zip(f.tensors.values(), offsets, strict=True):
                out.seek(offset)
                if is_weight(t):
                    out.write(tensor_values(f, t).data)
                else:
                    data = np.empty(t.nbytes, np.uint8)
                    f.read_tensor(t, 0, data)
                    out.write(data.data)
    return target
