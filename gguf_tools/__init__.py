"""Rewrites GGUF files into Tilebeam's tile layout and back; the command line is ``gguf-repack``.

    import gguf_tools
    gguf_tools.pack("model-q4_0.gguf", "model.tb.gguf")
    gguf_tools.verify("model.tb.gguf")
    [t.name for t in gguf_tools.manifest("model.tb.gguf").tensors]

All functions raise :class:`GGUFError` (one clear sentence) for files they cannot accept and ``OSError`` where reading
or writing fails. Output files appear under their name only when they are complete.
"""

from .contents import Manifest, TiledTensor, is_repacked, manifest
from .conversion import convert
from .errors import GGUFError
from .gguf_file import GGUFFile, TensorInfo
from .model_check import check_model
from .repack import Report, pack, unpack
from .verification import Verified, inspect, verify

__all__ = [
    "GGUFError",
    "GGUFFile",
    "Manifest",
    "Report",
    "TensorInfo",
    "TiledTensor",
    "Verified",
    "check_model",
    "convert",
    "inspect",
    "is_repacked",
    "manifest",
    "pack",
    "unpack",
    "verify",
]
