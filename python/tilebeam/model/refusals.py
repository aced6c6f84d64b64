"""Refuse models that cannot run as asked: before anything is packed or loaded, as far as header, options and device
tell; and, what only a loaded model shows, those whose results are not deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError
from tilebeam.model.device_choice import undetermined
from tilebeam.model.file_check import CheckedFile
from tilebeam.model.load_options import Backend, CheckedOptions
from tilebeam.native import releases
from tilebeam.native.control import Control
from tilebeam.native.plugin import register


def refuse(
    file: CheckedFile, options: CheckedOptions, backend: Backend, groups: Sequence[gguf_tools.MatrixGroup]
) -> None:
    """Refuse a model that this llama.cpp, or this device, does not run as asked; `groups`: its matrices as they will
    run."""
    from tilebeam.native.llama import COMPUTED_WRONGLY

    if backend == "npu":
        if complaints := register().complaints:
            raise TilebeamError(f"Invalid environment settings: {'; '.join(complaints)}.")
        if not register().devices():
            raise TilebeamError("The NPU plugin is loaded but has no device.")
    releases.check_architecture(file.path, file.architecture)
    if when := COMPUTED_WRONGLY.get(file.architecture):
        raise TilebeamError(
            f"{file.path} cannot be run: this llama.cpp computes {file.architecture} models wrongly {when}."
        )
    if options.deterministic and (reason := undetermined(file.path, groups)):
        raise TilebeamError(reason)


def check_deterministic(
    file: CheckedFile, context: Any, control: Control, n_devices: int, failure: Callable[[int, str], TilebeamError]
) -> None:
    """Refuse a loaded model whose results depend on what else is computed; `failure` makes an exception of a code of
    llama_decode."""

    from tilebeam.model.same_bits import reads_alike

    def fail(code: int) -> NoReturn:
        raise failure(code, "")

    what, kind = f"{file.path} cannot be deterministic", f"{file.architecture} models"
    if any(".indexer." in matrix.name for matrix in file.matrices):
        raise TilebeamError(f"{what}: in which way {kind} choose among cells depends on how full the cache is.")
    before = control.status()["graphs"]
    context.fill([(0, 0, [0], 1)])
    if (code := context.decode(1)) != 0:
        fail(code)
    context.clear()
    if (graphs := control.status()["graphs"] - before) > n_devices:
        raise TilebeamError(
            f"{what}: the device leaves operations of {kind} to the CPU backend, whose sums depend on the batch "
            f"(a graph is in {graphs} pieces, not {n_devices})."
        )
    if not reads_alike(context, fail, generates=file.generates, ranks=file.pooling == "rank"):
        raise TilebeamError(
            f"{what}: llama.cpp makes {kind} read a text in another way if it is read in other pieces, or if its "
            "cells lie elsewhere."
        )
