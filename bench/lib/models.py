"""The random models that benches measure, written on first use to build/bench under names that say what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilebeam.gguf import GGUFFile

from bench.lib import CACHE, synth


def synthetic(
    preset: str,
    type: str = "q4_0",
    types: Mapping[str, str] | None = None,
    *,
    tied: bool | None = None,
    layers: int | None = None,
    arch: str | None = None,
    one_choice: bool = False,
) -> Path:
    """Return a model.

    Args:
        preset: of bench/lib/synth.py: shapes.
        type: of the matrices.
        types: of single roles instead, e.g. {"ffn_down": "q8_0"}.
        tied: whether the output matrix is the embedding table; None: as the preset has it.
        layers: instead of the preset's.
        arch: architecture; None: the preset's, or qwen2.
        one_choice: the router of a mixture sends every token to the same experts.
    """
    arch = arch or synth.PRESETS[preset].get("arch", "qwen2")
    roles = dict(types or {})
    parts = [preset, type, *(f"{role}.{kind}" for role, kind in sorted(roles.items()))]
    parts += ["untied"] if tied is False else ["tied"] if tied else []
    parts += [f"{layers}layers"] if layers else []
    parts += [arch] if arch != "qwen2" else []
    parts += ["one-choice"] if one_choice else []
    path = CACHE / f"{'-'.join(parts)}.gguf"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        changes = ({} if tied is None else {"tied": tied}) | ({"n_layer": layers} if layers else {})
        changes |= {"router_std": 0.0} if one_choice else {}
        synth.write_model(path, synth.preset(preset, arch=arch, type=type, types=roles, **changes), progress=True)
    return path


@dataclass(frozen=True)
class Matrices:
    """What a decode step multiplies by, for shares of the machine's limits.

    Attributes:
        weights, bytes: of all matrices but the embedding table, which is looked up, unless it is the output matrix too;
            of experts as many as a token uses.
        output_weights: of the output matrix alone, which a prefill needs for its last token only.
    """

    weights: int
    bytes: int
    output_weights: int

    @staticmethod
    def of(path: Path) -> Matrices:
        with GGUFFile(path) as file:
            all = [t for t in file.tensors.values() if len(t.ne) > 1 and t.rows > 1 and t.name.endswith(".weight")]
            experts = [file.kv[key].value for key in file.kv if key.endswith((".expert_used_count", ".expert_count"))]
        own = any(t.name == "output.weight" for t in all)
        output = "output.weight" if own else "token_embd.weight"
        used = [t for t in all if t.name != "token_embd.weight" or not own]
        part = min(experts) / max(experts) if len(experts) == 2 else 1
        return Matrices(
            round(sum(t.k * t.rows * (part if len(t.ne) > 2 else 1) for t in used)),
            round(sum(t.nbytes * (part if len(t.ne) > 2 else 1) for t in used)),
            sum(t.k * t.rows for t in used if t.name == output),
        )
