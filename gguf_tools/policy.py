"""Packing policies: the options of ``gguf-repack pack``, and the plan they give for a file's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import gguf
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from .errors import GGUFError
from .gguf_file import Q, TensorInfo, tensor_bytes, value_of
from .split import Source
from .weights import BLOCK, FLOAT_TYPES, TB_TYPE, fits_tiles, has_values, is_weight, layer_of, tiled_type

# Policies with a name.
Preset = Literal["lossless", "paper"]
GROUPINGS = tuple(ggml_ext.GROUPINGS)
KEEP = "keep"
# That floats are quantized to, in either grouping; other types become tiles as they are.
TYPES = {t.label: q for q, t in TB_TYPE.items() if ggml_ext.has_quantizer(t)}
RULE_TYPES = {**TYPES, "f16": Q.F16, "f32": Q.F32}  # a rule may also choose a type that is not tiled
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Rule:
    """Tensors whose name a regular expression matches (anywhere) get a type, and a grouping if one is given."""

    pattern: re.Pattern[str]
    type: str
    grouping: str | None = None
    of_preset: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``REGEX=TYPE`` or ``REGEX=TYPE:GROUPING``. Raises ValueError with a sentence."""
        regex, equals, value = text.rpartition("=")
        type, colon, grouping = value.lower().partition(":")
        if not equals or not regex:
            raise ValueError(f"{text!r} is not REGEX=TYPE, for instance ffn_down=q8_0")
        if type != KEEP and type not in RULE_TYPES:
            raise ValueError(f"{text!r}: the type is one of {', '.join((KEEP, *RULE_TYPES))}")
        if colon and grouping not in GROUPINGS:
            raise ValueError(f"{text!r}: the grouping is one of {', '.join(GROUPINGS)}")
        try:
            return cls(re.compile(regex), type, grouping or None)
        except re.error as e:
            raise ValueError(f"{text!r}: {regex!r} is not a regular expression ({e})") from None


@dataclass(frozen=True)
class Policy:
    """A way to pack.

    Attributes:
        type: "keep", or what weight matrices are quantized to: "q4_0", "q8_0", "iq4_nl".
        grouping: elements that share a scale: "column" (ggml's 32 of a row) or "tile" (2 x 16).
        rules: the first that matches a tensor's name decides, before ``type`` and ``grouping``. Without one, embeddings
            in floats become Q8_0 where weights are quantized and the output matrix is made of them at load time.
    """

    type: str = KEEP
    grouping: str = "column"
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for value, allowed in ((self.type, (KEEP, *TYPES)), (self.grouping, GROUPINGS)):
            if value not in allowed:
                raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")

    @classmethod
    def make(
        cls,
        *,
        preset: str | None = None,
        type: str | None = None,
        grouping: str | None = None,
        tensor_types: Iterable[str] = (),
        output_tensor_type: str | None = None,
        token_embedding_type: str | None = None,
    ) -> Self:
        """Make a policy of the command line's options; explicit ones come before the preset's.

        "lossless" keeps every type and ggml's own grouping. "paper" is the policy of "Scaling LLM Test-Time Compute
        with Mobile NPU on Smartphones": Q4_0 with the down projections in Q8_0, one scale per 2 x 16 block.

        Raises:
            ValueError: options that contradict each other or are unknown.
        """
        rules = [Rule.parse(text) for text in tensor_types]
        for option, name in ((output_tensor_type, OUTPUT), (token_embedding_type, EMBEDDING)):
            if option is not None:
                rules.insert(0, Rule.parse(f"^{re.escape(name)}$={option}"))
        if preset == "lossless":
            if (type or KEEP) != KEEP or (grouping or "column") != "column" or rules:
                raise ValueError("the preset lossless changes no type and no grouping: leave out the other options")
        elif preset == "paper":
            rules.append(Rule(re.compile(r"ffn_down(_shexp|_exps|_chexps)?\.weight$"), "q8_0", of_preset=True))
            type, grouping = type or "q4_0", grouping or "tile"
        elif preset is not None:
            raise ValueError(f"{preset!r} is not one of {', '.join(get_args(Preset))}")
        return cls(type or KEEP, grouping or "column", tuple(rules))

    def rule(self, name: str) -> Rule | None:
        """Return the rule that decides about a tensor."""
        return next((rule for rule in self.rules if rule.pattern.search(name)), None)


@dataclass(frozen=True)
class Target:
    """The future of a tensor: its ggml type, and tiled type if it is stored as tiles."""

    source: TensorInfo
    type: gguf.GGMLQuantizationType
    tiled: Type | None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.source.name

    @property
    def nbytes(self) -> int:
        """Bytes of its values in ggml blocks; tiles of whole panels may take more."""
        return tensor_bytes(self.type, self.source.ne)

    @property
    def label(self) -> str:
        """Type and grouping for people, e.g. q4_0_tile."""
        return self.tiled.label if self.tiled is not None else self.type.name.lower()

    @property
    def exact(self) -> bool:
        """Can the source's bytes be had back from it?"""
        t = self.source.type
        return self.type == t and (self.tiled is None or self.tiled == ggml_ext.column_type(TB_TYPE[t]))

    @property
    def quantizes(self) -> bool:
        """Are values rounded to a type with fewer bits, or to other scales?"""
        return not self.exact and self.type != Q.F32


def plan(f: Source, policy: Policy) -> list[Target]:
    """Decide what each tensor becomes, in the file's order.

    Raises:
        GGUFError: a rule cannot be followed, or matches no matrix.
    """
    tied = OUTPUT not in f.tensors
    targets = [_target(t, policy, tied) for t in f.tensors.values()]
    # Layers that predict tokens behind the next one come last. llama.cpp skips them in some architectures, and a file
    # is refused if tiles of it are not loaded.
    layers, ahead = (value_of(f.kv, f"{f.architecture}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if isinstance(layers, int) and isinstance(ahead, int):
        last = range(layers - ahead, layers)
        targets = [replace(t, tiled=None) if layer_of(t.name, layers) in last else t for t in targets]
    for rule in policy.rules:
        if not rule.of_preset and not any(rule.pattern.search(t.name) for t in targets if is_weight(t.source)):
            raise GGUFError(f"{f.path} has no weight matrix for the rule {rule.pattern.pattern}={rule.type}")
    return targets


def _target(t: TensorInfo, policy: Policy, tied: bool) -> Target:
    rule = policy.rule(t.name) if is_weight(t) else None
    grouping = (rule and rule.grouping) or policy.grouping
    named = rule is not None and not rule.of_preset  # by the user, who is told where it cannot be followed
    name = (rule.type if rule is not None else policy.type) if named or (is_weight(t) and fits_tiles(t)) else KEEP
    if tied and t.name == EMBEDDING and rule is None and policy.type != KEEP and t.type in FLOAT_TYPES:
        name = "q8_0" if t.k % BLOCK == 0 else KEEP  # the output matrix is made of them, too
    to = t.type if name == KEEP else RULE_TYPES[name]
    if to != t.type and not has_values(t.type):
        if not named:
            return Target(t, t.type, None)
        raise GGUFError(f"tensor {t.name!r} is {t.type.name}, which cannot be converted to {to.name}")
    if to not in FLOAT_TYPES and to != t.type and t.k % BLOCK:
        raise GGUFError(f"tensor {t.name!r} has rows of {t.k}, which are not whole {to.name} blocks")
    return Target(t, to, tiled_type(to, grouping) if fits_tiles(t) else None)
