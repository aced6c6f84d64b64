"""The overrides that llama.cpp and the plugin need to load a repacked file.

Such a file fails closed: under the keys that llama.cpp reads, its architecture is `tilebeam`, and it has no number of
layers (tilebeam.gguf). Both are given as overrides, to a load that the plugin gets the list of tiles for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError
from tilebeam.native.control import AnnouncedTensor

MAX_VALUE = 127  # bytes of a text in an override


@dataclass(frozen=True)
class RepackedFile:
    """A repacked file as it is loaded.

    Attributes:
        path: the file.
        overrides: keys of the metadata that llama.cpp gets from here: texts and numbers.
        tensors: those that are tiles.
    """

    path: str
    overrides: dict[str, str | int]
    tensors: tuple[AnnouncedTensor, ...]

    @classmethod
    def of(cls, manifest: gguf_tools.Manifest) -> RepackedFile:
        """Read what a file says of itself.

        Raises:
            TilebeamError: its architecture has an impossible name.
        """
        overrides: dict[str, str | int] = {"general.architecture": manifest.architecture}
        if not 0 < len(manifest.architecture.encode()) <= MAX_VALUE - len(gguf_tools.layers_key("")):
            raise TilebeamError(
                f"{manifest.path} cannot be loaded: its real architecture is {manifest.architecture!r}."
            )
        if manifest.layers is not None:
            overrides[gguf_tools.layers_key(manifest.architecture)] = manifest.layers
        tensors = []
        for t in manifest.tensors:
            ne = (*t.ne, 1, 1, 1)
            tensors.append(AnnouncedTensor(t.name, int(t.type), (ne[0], ne[1], ne[2], ne[3]), t.offset))
        return cls(str(manifest.path), overrides, tuple(tensors))

    def override(self, params: Any) -> None:
        """Put the overrides into llama_model_params, before those that are there."""
        import llama_cpp.llama_cpp as capi

        given, n = params.kv_overrides, 0
        while given and given[n].key:
            n += 1
        array = (capi.llama_model_kv_override * (len(self.overrides) + n + 1))()
        for entry, (key, value) in zip(array, self.overrides.items(), strict=False):
            entry.key = key.encode()
            if isinstance(value, str):
                entry.tag, entry.value.val_str = capi.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
            else:
                entry.tag, entry.value.val_i64 = capi.LLAMA_KV_OVERRIDE_TYPE_INT, value
        for i in range(n):  # of two with the same key the first counts
            ctypes.pointer(array[len(self.overrides) + i])[0] = given[i]
        params.kv_overrides = array
