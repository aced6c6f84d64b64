"""The options of the NPU that are given by name, wherever they are given: their values."""

from __future__ import annotations

from typing import Literal

# How the NPU side runs; in the order of enum tilebeam_executor.
Executor = Literal["thread", "process", "qemu-hexagon"]
# Its matrix arithmetic: int8 products per 32 inputs, or FP16 operands.
Numerics = Literal["int8", "fp16"]
# Its flash attention: exponentials from a table, or all in float32.
Softmax = Literal["table", "exact"]
