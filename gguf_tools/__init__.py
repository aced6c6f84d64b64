"""Rewrites GGUF files into Tilebeam's tile layout and back; the command line is ``gguf-repack``.

    from tilebeam import gguf as gguf_tools
    gguf_tools.pack("model-q4_0.gguf", "model.tb.gguf")
    gguf_tools.verify("model.tb.gguf", against="model-q4_0.gguf")
    gguf_tools.pack("model-f16.gguf", "model.tb.gguf", policy=gguf_tools.Policy.make(preset="paper"), search=True)
    [t.name for t in gguf_tools.manifest("model.tb.gguf").tensors]

All functions raise :class:`GGUFError` (one clear sentence) for files they cannot accept and ``OSError`` where reading
or writing fails. Output files appear under their name only when they are complete.
"""

from .adapter_check import Pair, check_adapter
from .contents import ARCHITECTURE, Manifest, TiledTensor, is_repacked, manifest, read_manifest
from .conversion import convert
from .errors import GGUFError
from .gguf_file import GGUFFile, TensorInfo
from .imatrix import load_imatrix
from .inspection import inspect
from .model_check import check_model
from .policy import Policy, Rule
from .repack import Report, TensorReport, pack, unpack
from .split import Source, open_gguf
from .verification import Verified, verify

__all__ = [
    "ARCHITECTURE",
    "GGUFError",
    "GGUFFile",
    "Manifest",
    "Pair",
    "Policy",
    "Report",
    "Rule",
    "Source",
    "TensorInfo",
    "TensorReport",
    "TiledTensor",
    "Verified",
    "check_adapter",
    "check_model",
    "convert",
    "inspect",
    "is_repacked",
    "load_imatrix",
    "manifest",
    "open_gguf",
    "pack",
    "read_manifest",
    "unpack",
    "verify",
]
