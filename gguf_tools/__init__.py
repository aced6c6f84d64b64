"""Rewrites GGUF files into Tilebeam's tile layout and back; the command line is ``gguf-repack``.

    from tilebeam import gguf as gguf_tools
    gguf_tools.pack("model-q4_0.gguf", "model.tb.gguf")
    gguf_tools.verify("model.tb.gguf", against="model-q4_0.gguf")
    gguf_tools.pack("model-f16.gguf", "model.tb.gguf", policy=gguf_tools.Policy.make(preset="paper"), search=True)
    [t.name for t in gguf_tools.manifest("model.tb.gguf").tensors]

All functions raise :class:`GGUFError` (one clear sentence) for files they cannot accept and ``OSError`` where reading
or writing fails. Output files appear under their name only when they are complete.

Importing the package is cheap: numpy, gguf and the native library are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter_check import Pair, check_adapter
    from .contents import (
        ARCHITECTURE,
        Manifest,
        TiledTensor,
        architecture_of,
        is_repacked,
        layers_key,
        manifest,
        model_kv,
        read_manifest,
    )
    from .conversion import convert
    from .errors import GGUFError
    from .gguf_file import GGUFFile, TensorInfo
    from .imatrix import load_imatrix
    from .inspection import inspect
    from .matrices import (
        WITHOUT_OUTPUT,
        Matrix,
        MatrixGroup,
        device_share,
        grouped,
        layer_of,
        matrices_of,
        runs_on_device,
    )
    from .model_check import check_model
    from .policy import Policy, Rule
    from .repack import Report, TensorReport, pack, unpack
    from .split import Source, open_gguf
    from .verification import Verified, verify

_HOME = {
    "Pair": "adapter_check",
    "check_adapter": "adapter_check",
    "ARCHITECTURE": "contents",
    "Manifest": "contents",
    "TiledTensor": "contents",
    "architecture_of": "contents",
    "is_repacked": "contents",
    "layers_key": "contents",
    "manifest": "contents",
    "model_kv": "contents",
    "read_manifest": "contents",
    "convert": "conversion",
    "GGUFError": "errors",
    "GGUFFile": "gguf_file",
    "TensorInfo": "gguf_file",
    "load_imatrix": "imatrix",
    "inspect": "inspection",
    "WITHOUT_OUTPUT": "matrices",
    "Matrix": "matrices",
    "MatrixGroup": "matrices",
    "device_share": "matrices",
    "grouped": "matrices",
    "layer_of": "matrices",
    "matrices_of": "matrices",
    "runs_on_device": "matrices",
    "check_model": "model_check",
    "Policy": "policy",
    "Rule": "policy",
    "Report": "repack",
    "TensorReport": "repack",
    "pack": "repack",
    "unpack": "repack",
    "Source": "split",
    "open_gguf": "split",
    "Verified": "verification",
    "verify": "verification",
}

__all__ = [
    "ARCHITECTURE",
    "WITHOUT_OUTPUT",
    "GGUFError",
    "GGUFFile",
    "Manifest",
    "Matrix",
    "MatrixGroup",
    "Pair",
    "Policy",
    "Report",
    "Rule",
    "Source",
    "TensorInfo",
    "TensorReport",
    "TiledTensor",
    "Verified",
    "architecture_of",
    "check_adapter",
    "check_model",
    "convert",
    "device_share",
    "grouped",
    "inspect",
    "is_repacked",
    "layer_of",
    "layers_key",
    "load_imatrix",
    "manifest",
    "matrices_of",
    "model_kv",
    "open_gguf",
    "pack",
    "read_manifest",
    "runs_on_device",
    "unpack",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
