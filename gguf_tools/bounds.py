"""Error bounds of types: how far stored values may be from those they were made of, checked group by group.

Round to nearest keeps every value of a group of 32 within a fixed share of the group's largest magnitude, see
``LARGEST``. A search for better scales may move one value further, but not the group's root mean square error, unless
it weighs the inputs, and a calibration makes up for one value's error with others: then only the whole tensor's error
is bounded.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from .gguf_file import Q
from .weights import BLOCK, Floats

Doubles = npt.NDArray[np.float64]

HALF = 2.0**-11  # relative error of rounding to FP16
TINY = 2.0**-24  # half a step of FP16's subnormals, times two

# Largest error of a value over its group's largest magnitude.
#   Q4_0: the extreme value is -8, so that its opposite would be 8 and is stored as 7: one whole step of amax / 8
#   Q8_0: half a step of amax / 127
#   IQ4_NL: the extreme is -127, its opposite is stored as 113; the widest gap elsewhere is 24, half of it less
LARGEST = {Q.Q4_0: 1 / 8, Q.Q8_0: 0.5 / 127, Q.IQ4_NL: 14 / 127}
STEPS = {Q.Q4_0: 8, Q.Q8_0: 127, Q.IQ4_NL: 127}
# With an importance matrix or a calibration: root mean square error of a whole tensor over its own root mean square.
# Without them the bounds on groups keep it below 0.35 and 0.025 whatever the weights are.
TENSOR = {Q.Q4_0: 0.5, Q.Q8_0: 0.05, Q.IQ4_NL: 0.5}


def _groups(x: Doubles, tile: bool) -> Doubles:
    """Reshape to (groups, 32): the values that share a scale. For tiles, 2 (k) x 16 (n) blocks."""
    rows, k = x.shape
    if not tile:
        return x.reshape(-1, BLOCK)
    return x.reshape(rows // 16, 16, k // 2, 2).transpose(0, 2, 1, 3).reshape(-1, BLOCK)


def worst(x: Floats, y: Floats, type: gguf.GGMLQuantizationType, tile: bool, scales: str) -> float:
    """Return the worst group's (or value's) error over its bound; above 1 the values are not those the type gives.

    Args:
        x: values of the source, float32 (rows, k); whole panels of rows for ``tile``.
        y: values as stored.
        type: ggml type they are stored in.
        tile: 2 x 16 blocks share a scale, not 32 of a row.
        scales: "nearest", "search", "imatrix" or "calibrate".
    """
    a: Doubles = x.astype(np.float64)
    error = np.abs(a - y)
    if not np.isfinite(error).all():
        return float("inf")
    if type == Q.F32:
        return 0.0 if not error.any() else float("inf")
    if type == Q.F16:
        return float((error / (np.abs(a) * HALF + TINY)).max(initial=0.0))
    if scales == "calibrate":
        return 0.0
    amax = np.abs(_groups(a, tile)).max(axis=1)
    grouped = _groups(error, tile)
    if scales == "imatrix":
        # whatever an input's weight: no value leaves the range of its group
        return float((grouped.max(axis=1) / (amax * (1 + HALF) + TINY * STEPS[type])).max(initial=0.0))
    size = grouped.max(axis=1) if scales == "nearest" else np.sqrt(np.square(grouped).mean(axis=1))
    return float((size / (amax * (LARGEST[type] + HALF) + TINY * STEPS[type])).max(initial=0.0))
