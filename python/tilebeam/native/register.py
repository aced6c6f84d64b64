"""`tilebeam.register`: the NPU for programs that use llama_cpp as it is.

Beside loading the plugin, it puts one function in front of llama_cpp's ``llama_model_load_from_file``, which is what
``llama_cpp.Llama`` calls. Ordinary files go straight through. A repacked file is announced to the plugin, gets the
overrides that llama.cpp needs for it, and is given back only if the NPU holds all its tiles. This is the only thing of
llama_cpp that Tilebeam replaces; a program that keeps the function it found before gets llama.cpp's own refusal of
repacked files.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.native import plugin
from tilebeam.native.control import control
from tilebeam.native.fork_locks import free_in_children
from tilebeam.native.plugin import Registry
from tilebeam.native.repacked import RepackedFile

_NAME = "llama_model_load_from_file"
_KEY, _TEXT = b"general.architecture", 8
_HEAD = 1 << 16  # bytes that the key is looked for in: nearly all files begin with it
_lock = free_in_children()


def register() -> Registry:
    """Load the plugin, once per process; later calls return the same registry.

    Afterwards stock ``llama_cpp.Llama(path, n_gpu_layers=-1, flash_attn=True)`` runs GGUF files on the NPU, ordinary
    ones and those that ``gguf-repack`` wrote.

    Raises:
        TilebeamError: there is no plugin for this llama-cpp-python, or the plugin refuses its ggml.
    """
    registry = plugin.register()
    import llama_cpp
    import llama_cpp.llama_cpp as capi

    with _lock:
        original = getattr(capi, _NAME)
        if not hasattr(original, "tilebeam_original"):
            wrapper = _in_front_of(original)
            for module in (capi, llama_cpp):
                if getattr(module, _NAME) is original:
                    setattr(module, _NAME, wrapper)
    return registry


def own_load() -> Any:
    """Return llama.cpp's own ``llama_model_load_from_file``, whether `register` was called or not."""
    plugin.ggml()
    import llama_cpp.llama_cpp as capi

    function = getattr(capi, _NAME)
    return getattr(function, "tilebeam_original", function)


def _in_front_of(original: Any) -> Any:
    @functools.wraps(original)
    def llama_model_load_from_file(path_model: bytes, params: Any, /) -> Any:
        if not may_be_repacked(path_model):
            return original(path_model, params)
        return _load(original, path_model, params)

    llama_model_load_from_file.tilebeam_original = original  # type: ignore[attr-defined]
    return llama_model_load_from_file


def may_be_repacked(path: bytes | str | os.PathLike[str]) -> bool:
    """Tell whether the beginning of a file leaves it open that it is repacked; that of nearly any other file does
    not."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    if not head.startswith(b"GGUF"):
        return False
    at = head.find(_KEY)
    name = gguf_tools.ARCHITECTURE.encode()
    value = _TEXT.to_bytes(4, "little") + len(name).to_bytes(8, "little") + name
    return at < 0 or head.startswith(value, at + len(_KEY))


def _load(original: Any, path: bytes, params: Any) -> Any:
    """Load a file that is repacked, or turns out not to be.

    Raises:
        TilebeamError: it is repacked and cannot be loaded, or not so; says what to do.
    """
    import llama_cpp.llama_cpp as capi

    from tilebeam.native import llama

    name = os.fsdecode(path)
    with gguf_errors(f"{name} cannot be loaded"), gguf_tools.GGUFFile(name) as f:
        if f.architecture != gguf_tools.ARCHITECTURE:
            return original(path, params)
        manifest = gguf_tools.read_manifest(f)
    if params.split_mode == capi.LLAMA_SPLIT_MODE_TENSOR:
        raise TilebeamError(
            f"{name} is repacked, and split_mode=LLAMA_SPLIT_MODE_TENSOR would cut its tiles: load it with "
            "split_mode=LLAMA_SPLIT_MODE_LAYER, or take the ordinary file."
        )
    file, npu = RepackedFile.of(manifest), control()
    own = type(params).from_buffer_copy(params)
    file.override(own)
    npu.take_error()
    with llama.log_router().capture(echo=True) as log, npu.announced(name, file.tensors):
        model = original(path, own)
        made = npu.loaded()
    if not model:
        reason = npu.take_error() or llama.errors_in(log) or "llama.cpp gave no reason"
        raise TilebeamError(f"{name} cannot be loaded: {reason}")
    if own.vocab_only or (made.announced_tensors == len(file.tensors) and not made.bad_buffers):
        return model
    capi.llama_model_free(model)
    if made.bad_buffers:
        raise TilebeamError(f"{name} cannot be loaded: {made.reason}")
    raise TilebeamError(
        f"{name} is repacked for the NPU, which got {made.announced_tensors} of its {len(file.tensors)} tiled tensors; "
        "nothing else can read them. Load it with n_gpu_layers=-1."
    )
