"""Says what is in a GGUF: for scripts as plain data, for people as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from . import contents as m
from .gguf_file import GGUFFile, KeyValue, TensorInfo
from .matrices import MatrixGroup, device_share, grouped, is_multiplied, is_output, matrices_of, runs_on_device
from .split import Source, open_gguf
from .weights import FLOAT_TYPES, is_looked_up

LONG_TEXT = 200
MIB = 1 << 20


def device_of(f: Source, t: TensorInfo) -> str:
    """Tell where a tensor is used when the model is loaded with all layers on the device: "NPU", "CPU" or "CPU, NPU".

    The CPU looks embeddings up, and multiplies with types that are not tiled. Of tied embeddings the device makes
    itself an output matrix. Vectors, kernels and the tables of a layer, which are not multiplied by, are floats on the
    device.
    """
    if is_looked_up(t.name) and "norm" not in t.name and not t.name.startswith("blk."):
        return "CPU, NPU" if runs_on_device(t) and is_output(f, t) else "CPU"
    runs = runs_on_device(t) if is_multiplied(f, t) else t.type in FLOAT_TYPES
    return "NPU" if runs else "CPU"


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a GGUF, ordinary or repacked, ready for JSON.

    Returns:
        ``path``, ``size``, ``version``, ``alignment``, ``architecture`` (the real one), ``repacked`` (None, or the
        manifest's fields), ``metadata`` (arrays as ``{"array": length}``), ``types`` (tensors and bytes per type),
        ``matrices`` (the weight matrices by type and place: fields of :class:`MatrixGroup`), ``device_share`` (the part
        of their bytes that the device multiplies by) and ``tensors`` (name, type, layout: None or that of tiles,
        grouping, ne, offset, nbytes, device: see :func:`device_of`). A split model is shown as a whole.

    Raises:
        GGUFError: the file is damaged.
        OSError: it cannot be read.
    """
    with open_gguf(path) as f:
        manifest = m.read_manifest(f) if isinstance(f, GGUFFile) and f.architecture == m.ARCHITECTURE else None
        layout = {t.name: t.type.label for t in manifest.tensors} if manifest else {}
        groups = grouped(matrices_of(f))
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for t in f.tensors.values():
            kind = layout.get(t.name, t.type.name.lower())
            count[kind] += 1
            size[kind] += t.nbytes
        return {
            "path": str(f.path),
            "size": f.size,
            "version": f.version,
            "alignment": f.alignment,
            "architecture": manifest.architecture if manifest else f.architecture,
            "repacked": None if manifest is None else _facts(manifest),
            "metadata": {key: _brief(kv) for key, kv in f.kv.items()},
            "matrices": [asdict(group) for group in groups],
            "device_share": device_share(groups),
            "types": {kind: {"tensors": count[kind], "bytes": size[kind]} for kind in count},
            "tensors": [
                {
                    "name": t.name,
                    "type": t.type.name.lower(),
                    "layout": (label := layout.get(t.name)),
                    "grouping": label and ("tile" if label.endswith("_tile") else "column"),
                    "ne": list(t.ne),
                    "offset": t.offset,
                    "nbytes": t.nbytes,
                    "device": device_of(f, t),
                }
                for t in f.tensors.values()
            ],
        }


def _facts(manifest: m.Manifest) -> dict[str, Any]:
    """Select of a manifest what is not said elsewhere, ready for JSON."""
    as_it_is = "layout_version tool_version source_alignment lossless same_contents scales source_sha256 data_sha256"
    facts = {name: getattr(manifest, name) for name in (*as_it_is.split(), "meta_sha256")}
    return facts | {"n_tiled": len(manifest.tensors)}


def _brief(kv: KeyValue) -> Any:
    if kv.array is not None:
        return {"array": kv.array[1]}
    value = kv.value
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return value[:LONG_TEXT] + "..."
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # JSON has no such number
    return value


def table(info: dict[str, Any]) -> Group:
    """Make a table for a terminal of what :func:`inspect` gave."""
    lines = [
        f"{info['path']}: {info['size'] / MIB:.1f} MiB, GGUF version {info['version']}, architecture "
        f"{info['architecture']}, alignment {info['alignment']}"
    ]
    r = info["repacked"]
    if r is None:
        lines.append("ordinary layout")
    else:
        lines.append(
            f"tile layout version {r['layout_version']}, {r['n_tiled']} tiled tensors, "
            f"{m.fidelity(r['lossless'], r['same_contents'])}, written by {r['tool_version']}"
        )
        lines.append(f"source sha256 {r['source_sha256']}")
    for kind, n in info["types"].items():
        lines.append(f"  {kind:12} {n['tensors']:5} tensors {n['bytes'] / MIB:10.1f} MiB")
    tensors = Table(box=None, pad_edge=False)
    for name in ("tensor", "type", "grouping", "shape", "bytes", "device"):
        number = name in ("shape", "bytes")
        tensors.add_column(name, justify="right" if number else "left", no_wrap=True, overflow="fold")
    for t in info["tensors"]:
        shape = " x ".join(map(str, t["ne"]))
        # the name may hold anything, brackets too
        tensors.add_row(Text(t["name"]), t["type"], t["grouping"] or "", shape, f"{t['nbytes']:,}", t["device"])
    places = matrix_table(MatrixGroup(**group) for group in info["matrices"])
    return Group(*(Text(line) for line in lines), Text("weight matrices"), places, Text(), tensors)


# Where and why, for people.
_PLACES = {
    "": "device",
    "type": "CPU: the device does not multiply by this type",
    "embeddings": "CPU: llama.cpp multiplies by the embedding table itself",
    "layers": "CPU: in layers that are not on the device",
    "model": "CPU: the whole model is there",
}


def matrix_table(groups: Iterable[MatrixGroup]) -> Table:
    """Make a table for a terminal of a model's weight matrices by type, and where they run."""
    rows = Table(box=None, pad_edge=False)
    rows.add_column("type", no_wrap=True)
    rows.add_column("matrices", justify="right", no_wrap=True)
    rows.add_column("MiB", justify="right", no_wrap=True)
    rows.add_column("multiplied on")
    for g in groups:
        larger = f", in {g.packed_bytes / MIB:.1f} MiB of memory" if g.packed_bytes > g.bytes else ""
        rows.add_row(g.type, str(g.matrices), f"{g.bytes / MIB:.1f}", _PLACES[g.why] + larger)
    return rows
