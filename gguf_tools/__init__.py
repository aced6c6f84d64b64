"""Rewrites GGUF files into Tilebeam's tile layout and back; the command line is ``gguf-repack``.

    from tilebeam import gguf as gguf_tools
    gguf_tools.pack("model-q4_0.gguf", "model.tb.gguf")
    gguf_tools.verify("model.tb.gguf", against="model-q4_0.gguf")
    gguf_tools.pack("model-f16.gguf", "model.tb.gguf", policy=gguf_tools.Policy.make(preset="paper"), search=True)
    [t.name for t in gguf_tools.manifest("model.tb.gguf").tensors]

All functions raise :class:`GGUFError` (one clear sentence) for files they cannot accept and ``OSError`` where reading
or writing fails. Output files appear under their name only when they are complete.

Importing the package is cheap: numpy, gguf and the native library are loaded on first use. ``__init__.pyi`` is the
table of the public names.
"""

from __future__ import annotations

from .lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals())
