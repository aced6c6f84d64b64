"""Numbers of the op contract for tests: op codes by name, types of tensors, floats as the int32 that params hold."""

from __future__ import annotations

import struct

from tilebeam._ext import ffi, lib

F32, F16, BF16, I32, I64 = lib.TB_F32, lib.TB_F16, lib.TB_BF16, lib.TB_I32, lib.TB_I64
Q4_0, Q8_0, IQ4_NL = lib.TB_Q4_0, lib.TB_Q8_0, lib.TB_IQ4_NL
OPS: dict[str, int] = {
    name.removeprefix("TB_OP_"): code
    for name, code in ffi.typeof("enum tb_op_code").relements.items()
    if name != "TB_OP_COUNT"
}


def float_param(x: float) -> int:
    """The int32 with the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])
