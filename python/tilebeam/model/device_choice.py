"""On which backend a model runs, and what is said where matrices of it run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type
from tilebeam.model.file_check import CheckedFile
from tilebeam.model.load_options import Backend, CheckedOptions
from tilebeam.native.executor import usable_memory

# The rule: a model runs on the device if that multiplies by at least this part of its matrices'
# bytes; below MANY sequences by the second. Every matrix that stays on the CPU cuts the graph of a token: the two
# thread pools take turns, and each turn costs a wake-up whatever the matrix has to do. With many sequences a matrix has
# more to do, and the device gains more on it. Two threads, 24 layers, 37 % on the device: 0.7 times as fast as the
# stock backend with one sequence, 1.2 with 8, 1.4 with 16; with nothing on the device 0.8 with one and with 16, with
# everything 1.2 with one. The lines between these points cross 1 at 0.75 for one sequence, at 0.2 for 8, at 0.1 for 16.
MANY = 8
LEAST_SHARE, LEAST_SHARE_OF_FEW = 0.25, 0.75


@dataclass(frozen=True)
class Choice:
    """A backend, and in a few words why it is that; `told`: that, not matrices which the device cannot run, is why a
    model runs on the CPU."""

    backend: Backend
    why: str
    told: bool = False


def choose(file: CheckedFile, options: CheckedOptions) -> Choice:
    """Choose the backend that a model runs on.

    An option that only the device has, or a file that only the device can read, asks for the device. Of the others, a
    rule chooses, which `python -m bench.families` compares with what both are in every family and type.
    """
    if options.device != "auto":
        return Choice(options.device, "asked for")
    asked = (options.executor, options.devices, options.memory_limit, options.deterministic or None)
    if file.repacked is not None or options.n_gpu_layers >= 0 or any(option is not None for option in asked):
        return Choice("npu", "the file or an option asks for it")
    groups = gguf_tools.grouped(file.matrices)
    share, packed = gguf_tools.device_share(groups), sum(g.packed_bytes for g in groups)
    # IQ1 to IQ3, Q1_0 and Q2_0 take more memory on the device than in the file, which the CPU backend maps.
    if packed > _bytes(groups) and packed > usable_memory().available:
        return Choice("cpu", "packed for the device, the matrices take more memory than there is", told=True)
    least = LEAST_SHARE if options.n_seq_max >= MANY else LEAST_SHARE_OF_FEW
    return Choice("npu" if share >= least else "cpu", f"{_percent(share)} of the matrices' bytes can run on the device")


def copied(file: CheckedFile, groups: Sequence[gguf_tools.MatrixGroup], spare: int) -> bool:
    """Tell whether weights are read into memory of their own rather than mapped from the file.

    The device multiplies by F16, BF16 and F32 as they lie in the file, and streams them a fourth faster from huge
    pages, which a file's pages in the cache seldom are.

    Args:
        groups: the file's matrices as they will run.
        spare: bytes of memory that are left, without swap.
    """
    floats = sum(g.bytes for g in groups if g.device == "npu" and not Type[g.type.upper()].is_in_tiles)
    if file.repacked is not None or _bytes(groups) >= 2 * floats:
        return False
    return sum(part.stat().st_size for part in file.parts) <= spare  # with what is looked up only


def undetermined(path: str, groups: Sequence[gguf_tools.MatrixGroup]) -> str | None:
    """Say why results would depend on what else is computed beside them; None: matrices are no reason.

    Args:
        groups: the model's matrices as it runs on the device.
    """
    left_out = [g for g in groups if g.device == "cpu"]
    if not left_out:
        return None
    why = _reasons(left_out) if any(g.why in ("type", "embeddings") for g in left_out) else "n_gpu_layers says so"
    return (
        f"{Path(path).name} cannot be deterministic: {_percent(_bytes(left_out) / _bytes(groups))} of the bytes of its "
        f"weight matrices run on the CPU backend, because {why}; sums there depend on the batch"
        f"{_advice(Path(path).name, left_out, repacked=False)}."
    )


def groups_of(file: CheckedFile, backend: Backend, n_gpu_layers: int) -> tuple[gguf_tools.MatrixGroup, ...]:
    """Group the model's weight matrices by type and place.

    Args:
        backend: that the model runs on.
        n_gpu_layers: layers on the device, -1 for all; the output counts as a layer.
    """
    first = max(0, file.weights.n_layer + 1 - n_gpu_layers) if n_gpu_layers >= 0 else 0
    return gguf_tools.grouped(file.matrices, first_layer=first, on_device=backend == "npu")


def warning(
    path: str, groups: Sequence[gguf_tools.MatrixGroup], choice: Choice, *, repacked: bool = False
) -> str | None:
    """Return one sentence where matrices run on the CPU that nobody asked to; None where all run on the device.

    Args:
        path: the file.
        groups: its matrices as it runs.
        choice: what `choose` chose.
        repacked: it is a repacked file.
    """
    name, left_out = Path(path).name, [g for g in groups if g.why in ("type", "embeddings")]
    if choice.told:
        return f'{name} runs on the CPU backend: {choice.why}; device="tilebeam" forces the device.'
    if not left_out:
        return None
    why, advice = _reasons(left_out), _advice(name, left_out, repacked)
    if choice.backend == "npu":
        part = _percent(_bytes(left_out) / _bytes(groups))
        return f"{name}: {part} of the bytes of its weight matrices run on the CPU, because {why}{advice}."
    left = _percent(_bytes([g for g in groups if g.why == "model"]) / _bytes(groups))
    return (
        f"{name} runs on the CPU backend as a whole, because {why}, which leaves it {left} of the bytes of the weight "
        f"matrices, and a model that is cut so often is slower than on the CPU alone{advice}; "
        'device="tilebeam" forces the device.'
    )


def summary(groups: Sequence[gguf_tools.MatrixGroup]) -> str:
    """Say in a few words what runs where."""
    on_cpu = [g for g in groups if g.device == "cpu"]
    if not on_cpu:
        return "all weight matrices on the device"
    return f"{_percent(_bytes(on_cpu) / _bytes(groups))} of the bytes of the weight matrices on the CPU"


def _bytes(groups: Sequence[gguf_tools.MatrixGroup]) -> int:
    return sum(g.bytes for g in groups)


def _reasons(left_out: Sequence[gguf_tools.MatrixGroup]) -> str:
    types = [f"{g.type.upper()} ({g.matrices})" for g in left_out if g.why == "type"]
    said = [f"the device does not multiply by matrices of {listed(types)}"] if types else []
    if any(g.why == "embeddings" for g in left_out):
        said.append("llama.cpp multiplies by the embedding table where that is")
    return " and ".join(said)


def _advice(name: str, left_out: Sequence[gguf_tools.MatrixGroup], repacked: bool) -> str:
    if all(g.why != "type" for g in left_out):
        return ""
    if repacked:
        return "; pack the file that it was made from with --type q8_0"
    return (
        "; take another file of the model, such as Q4_K_M, or quantize this one with "
        f"`gguf-repack pack {name} {name.removesuffix('.gguf')}-q8_0.gguf --type q8_0`"
    )


def listed(words: Sequence[str]) -> str:
    """Join words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _percent(share: float) -> str:
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "less than 1 %" if share < 0.01 else "more than 99 %" if share > 0.99 else f"{100 * share:.0f} %"
