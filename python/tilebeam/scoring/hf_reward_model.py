"""Out of a published reward model (a Hugging Face folder): the head's weights, and a body that llama.cpp can convert.

Such models hold a head beside an ordinary transformer, under a name of their own. llama.cpp's converter knows neither
the head's tensors nor the architecture's name, so `split_model` writes two things: the head as a small GGUF file, and
a folder like the original without the head, for convert_hf_to_gguf.py.

safetensors files are a JSON header (its length first, 8 bytes, little endian) and the tensors' bytes; nothing more is
needed to read and write them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_folder
from tilebeam.scoring.reward_formats import preset as preset_named
from tilebeam.scoring.reward_heads import Head, make_head

# The names heads have: TRL's value heads, transformers' classifiers, Qwen's process reward models.
_NAMES = r"(?:[\w.]+\.)?(?:v_head|value_head|score|reward_head|rm_head|classifier)(?:\.(?:summary|dense|out_proj))?"
_HEADER_LIMIT = 100 << 20  # safetensors' own
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# What a reward model's architecture is called, and what the converter knows its body as.
_BODY = re.compile(r"For(?:\w*Reward\w*|Prm\w*|SequenceClassification|TokenClassification)$")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Tensor:
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    size: int

    def values(self) -> npt.NDArray[np.float32]:
        """Return the tensor as float32."""
        if self.dtype not in _TYPES:
            raise TilebeamError(f"{self.file}: {self.name} has the type {self.dtype}; {', '.join(_TYPES)} can be read.")
        dtype = np.dtype(_TYPES[self.dtype])
        if self.size != math.prod(self.shape) * dtype.itemsize:
            raise TilebeamError(f"{self.file}: {self.name} has {self.size} bytes, its shape {self.shape} others.")
        flat = np.fromfile(self.file, dtype, math.prod(self.shape), offset=self.start)
        if self.dtype == "BF16":  # the upper half of a float32
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        return flat.astype(np.float32).reshape(self.shape)


def extract_head(
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    output: str | None = None,
    preset: str | None = None,
) -> Head:
    """Read the head of a published reward model.

    Args:
        source: its folder, or one of its .safetensors files.
        name: the head's tensors' name without layer number, .weight and .bias, such as "v_head.summary"; None: found.
        output: "sigmoid", "softmax" or "none"; None: the preset's; "none" for the single output of what config.json
            calls a sequence classification; else what its shape suggests.
        preset: remembered in the head's file.

    Raises:
        TilebeamError: there is no head, there are several, or the files are damaged.
    """
    found = _heads(_tensors(Path(source)), name)
    known = preset_named(preset) if preset else None
    if known is not None and output is None:
        output = known.output
    arrays = []
    for _, parts in sorted(found.items()):
        if "weight" not in parts:
            raise TilebeamError(f"{source}: the head has the bias {parts['bias'].name}, but no weight for it.")
        arrays.append((parts["weight"].values(), parts["bias"].values() if "bias" in parts else None))
    if output is None and len(arrays[-1][0]) == 1 and _classifies_sequences(Path(source)):
        output = "none"
    return make_head(arrays, output, known.label if known else None, preset)


def _classifies_sequences(source: Path) -> bool:
    config = source / "config.json"
    names = _json(config).get("architectures") if config.is_file() else None
    return isinstance(names, list) and any(str(n).endswith("ForSequenceClassification") for n in names)


def write_body(
    source: str | os.PathLike[str], target: str | os.PathLike[str], progress: Progress | None = None
) -> None:
    """Write a copy of a reward model's folder without its head, with an architecture that the converter knows.

    Args:
        source: the folder.
        target: a new folder; it appears when it is complete.
        progress: called with (bytes written, bytes in all).

    Raises:
        TilebeamError: the source is no such model, or the target exists.
    """
    folder, out = Path(source), Path(target)
    if not folder.is_dir():
        raise TilebeamError(f"{folder} is not a folder: a body is made of a whole model.")
    if out.exists():
        raise TilebeamError(f"{out} exists already.")
    tensors = _tensors(folder)
    heads = {t.name for parts in _heads(tensors, None).values() for t in parts.values()}
    total, done = sum(t.size for t in tensors if t.name not in heads), 0
    with whole_folder(out) as partial:
        for file in sorted(p for p in folder.iterdir() if p.is_file()):
            if file.suffix == ".safetensors":
                kept = [t for t in tensors if t.file == file and t.name not in heads]
                for written in _write_safetensors(partial / file.name, kept):
                    done += written
                    if progress is not None:
                        progress(done, total)
            elif file.name == "model.safetensors.index.json":
                index = _json(file)
                index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in heads}
                (partial / file.name).write_text(json.dumps(index, indent=2), encoding="utf-8")
            elif file.name == "config.json":
                (partial / file.name).write_text(json.dumps(_body_config(_json(file)), indent=2), encoding="utf-8")
            elif file.stat().st_size < _HEADER_LIMIT and file.suffix not in (".bin", ".pt", ".py"):
                shutil.copyfile(file, partial / file.name)


def _body_config(config: dict[str, Any]) -> dict[str, Any]:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise TilebeamError("config.json names no architecture.")
    plain = _BODY.sub("ForCausalLM", names[0])
    return {k: v for k, v in config.items() if k != "auto_map"} | {"architectures": [plain]}


def _heads(tensors: list[_Tensor], name: str | None) -> dict[int, dict[str, _Tensor]]:
    """Find the one head: layer number -> its weight and bias."""
    groups: dict[str, dict[int, dict[str, _Tensor]]] = {}
    names = _NAMES if name is None else re.escape(name)
    part = re.compile(rf"(?P<name>{names})(?:\.(?P<layer>\d+))?\.(?P<part>weight|bias)")
    for tensor in tensors:
        if match := part.fullmatch(tensor.name):
            parts = groups.setdefault(match["name"], {}).setdefault(int(match["layer"] or 0), {})
            if (other := parts.setdefault(match["part"], tensor)) is not tensor:
                raise TilebeamError(f"{other.name} and {tensor.name} are the same layer of one head.")
    if not groups:
        some = ", ".join(t.name for t in tensors if "layers." not in t.name)
        raise TilebeamError(
            f"No {name or 'head'} in these files, which hold{' besides layers ' if some else ' layers only'}"
            f"{some[:300]}: is it a reward model of the token kind, which has none?"
        )
    if len(groups) > 1:
        raise TilebeamError(f"Several heads found: {', '.join(groups)}. Choose one by its name (--name).")
    return next(iter(groups.values()))


def _tensors(source: Path) -> list[_Tensor]:
    """List all tensors of a folder or file, in the order of their names."""
    if source.is_dir():
        files = sorted(source.glob("*.safetensors"))
        if not files:
            raise TilebeamError(f"{source} holds no .safetensors files; other formats (.bin) are not read.")
    elif source.is_file():
        files = [source]
    else:
        raise TilebeamError(f"{source} does not exist.")
    found: dict[str, _Tensor] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in found:
                raise TilebeamError(f"{tensor.name} is in {found[tensor.name].file} and in {file}.")
            found[tensor.name] = tensor
    return [found[name] for name in sorted(found)]


def _header(file: Path) -> Iterator[_Tensor]:
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size - 8, _HEADER_LIMIT):
            raise TilebeamError(f"{file} is not a safetensors file.")
        try:
            header = json.loads(f.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                if not all(isinstance(n, int) for n in (begin, end)) or not 0 <= begin <= end <= size - 8 - length:
                    raise TilebeamError(f"{file}: {name} is outside the file: the file is incomplete.")
                if not all(isinstance(n, int) and n >= 0 for n in entry["shape"]):
                    raise TilebeamError(f"{file}: {name} has the shape {entry['shape']}.")
                yield _Tensor(file, name, str(entry["dtype"]), tuple(entry["shape"]), 8 + length + begin, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TilebeamError(f"{file} is not a safetensors file: {error}") from None


def _write_safetensors(file: Path, tensors: list[_Tensor]) -> Iterator[int]:
    """Write the tensors, bytes as they are; yields how many bytes were written."""
    if not tensors:
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.size]}
        at += t.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for t in tensors:
            np.fromfile(t.file, np.uint8, t.size, offset=t.start).tofile(out)
            yield t.size


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TilebeamError(f"{file} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise TilebeamError(f"{file} holds no object.")
    return value
