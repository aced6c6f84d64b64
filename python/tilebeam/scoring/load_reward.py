"""Loads a reward model: what its kind, format and head are, and the scorer that follows.

What the caller leaves open is found in the file's metadata (reward.kind, .preset, .tag, .good, .bad), in the classifier
that the file holds, in a head file beside it (MODEL.head.gguf), or in the preset that its name tells. All that
can be wrong in the files and arguments is found before the model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.model.load_options import LoadOptions
from tilebeam.scoring.reward_formats import KINDS, PRESETS, Preset, RewardFormat, preset, preset_of
from tilebeam.scoring.scoring_defaults import AGGREGATION, STEP_STOP, Aggregation, Kind

# What needs numpy or the native libraries comes with the first reward model: a command's --help does without.
if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_heads import Head
    from tilebeam.scoring.reward_model import RewardModel

_SEQUENCES = 127  # more would not make the engine keep more: llama.cpp has 256 at most


@dataclass(frozen=True)
class RewardSpec:
    """Which reward model, and what is known of it; the arguments of `load_reward_model`.

    Attributes:
        path: the GGUF file; None: the generator itself, with `head`.
        outcome: it rates whole texts, not steps.
        kind: how it gives its verdict, None to find out.
        preset: a name of `tilebeam.scoring.reward_formats.PRESETS`, None to find out.
        head: its head's file, None to find it. Without `path`: of the generator's own head, or the files of several
            generators' heads.
        tag: instead of the preset's.
        labels: good and bad label, instead of the preset's.
        aggregate: of the steps' scores.
    """

    path: str | os.PathLike[str] | None
    outcome: bool = False
    kind: Kind | None = None
    preset: str | None = None
    head: str | os.PathLike[str] | tuple[str | os.PathLike[str], ...] | None = None
    tag: str | None = None
    labels: Sequence[str] | None = None
    aggregate: Aggregation = AGGREGATION

    @property
    def own(self) -> bool:
        """Tell whether it is a head on the generator's own hidden states."""
        return self.path is None

    def check(self) -> None:
        """Raise `TilebeamError` if this cannot work, as far as the files tell without the model being loaded."""
        if not self.own:
            _plan(self)
        elif not self.own_heads:
            raise TilebeamError("A reward model is required, or a reward head of the generator's own.")

    @cached_property
    def format(self) -> RewardFormat:
        """Return how a reward model wants its text, as far as files and arguments say."""
        return RewardFormat() if self.own else _plan(self).preset.format

    def load(self, **options: Any) -> RewardModel:
        """Call `load_reward_model` with these arguments, and others as keywords."""
        assert not self.own
        return load_reward_model(**{f.name: getattr(self, f.name) for f in fields(self)}, **options)

    def open(self, lm: LM, *, step_stop: str = STEP_STOP, **options: Any) -> RewardModel | OwnReward:
        """Make the scorer: the generator's own head, or a reward model that is loaded with these options.

        Args:
            lm: the generator.
            step_stop, options: see `load_reward_model`.
        """
        if not self.own:
            return self.load(step_stop=step_stop, **options)
        from tilebeam.scoring.own_reward import OwnReward, made_for

        head = made_for(lm, self.own_heads)
        if head.adapter is not None:
            from tilebeam.scoring.adapter_reward import AdapterReward

            return AdapterReward(lm, head, step_stop=step_stop)
        return OwnReward(lm, head, aggregate=self.aggregate, step_stop=step_stop)

    def hidden_layer(self, model: str | os.PathLike[str]) -> int | None:
        """Return the ``hidden_layer`` that a generator is to be loaded with for its own head."""
        if not self.own:
            return None
        from tilebeam.scoring.own_reward import layer_for

        return layer_for(model, self.own_heads)

    @cached_property
    def own_heads(self) -> tuple[Head, ...]:
        """The generators' heads, read once."""
        from tilebeam.scoring.own_reward import check_own
        from tilebeam.scoring.reward_heads import load_head

        files = self.head if isinstance(self.head, tuple) else (self.head,)
        heads = tuple(load_head(file) for file in files if file is not None)
        for head in heads:
            check_own(head)
        return heads


def load_reward_model(
    path: str | os.PathLike[str],
    *,
    outcome: bool = False,
    kind: Kind | None = None,
    preset: str | None = None,
    head: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    labels: Sequence[str] | None = None,
    aggregate: Aggregation = AGGREGATION,
    step_stop: str = STEP_STOP,
    n_ctx: int = LoadOptions.n_ctx,
    n_seq_max: int = _SEQUENCES,
    **load: Any,
) -> RewardModel:
    """Load a reward model: a `TokenReward` or `HeadReward`, as the file or the arguments say.

    Use it as a context manager or call its `close`, which frees the model.

    Args:
        path: a GGUF file, ordinary or written by ``gguf-repack``.
        outcome: it rates whole texts (an outcome reward model). A process reward model then rates a text by its last
            step.
        kind: how it gives its verdict: "token", "value-head", "two-label" or "classifier".
        preset: how it wants its text and gives its verdict, by a name of `tilebeam.scoring.reward_formats.PRESETS`.
        head: file with the weights of its head; see `tilebeam.load_head`.
        tag: what ends every step, where the verdict is read.
        labels: the good and the bad label (kind "token"), one token each.
        aggregate: of the steps' scores: "last", "min", "prod" or "mean".
        step_stop: what ends a step of the texts that it will rate.
        n_ctx: as of the search's own model; the reward model gets half as many cells more, for tags.
        n_seq_max: at least; many sequences let the cells of many beams be kept, and cost little.
        load: further arguments of `tilebeam.load`: device, threads, executor ...

    Raises:
        TilebeamError: the files or arguments do not fit each other or this model.
    """
    plan = _plan(RewardSpec(path, outcome, kind, preset, head, tag, labels, aggregate))
    from tilebeam.model.loader import load as load_model
    from tilebeam.scoring.reward_model import HeadReward, TokenReward

    options: dict[str, Any] = {"format": plan.preset.format, "outcome": plan.outcome, "aggregate": plan.aggregate}
    lm = load_model(plan.path, n_ctx=n_ctx + n_ctx // 2, n_seq_max=max(n_seq_max, _SEQUENCES), **load)
    try:
        scorer: RewardModel
        if plan.head is None:
            scorer = TokenReward(lm, good=plan.preset.good, bad=plan.preset.bad, step_stop=step_stop, **options)
        else:
            scorer = HeadReward(lm, plan.head, step_stop=step_stop, **options)
    except BaseException:
        lm.close()
        raise
    scorer.about = plan.about
    return scorer


@dataclass(frozen=True)
class _Plan:
    """Arguments and what the files say, made one."""

    path: Path
    preset: Preset
    head: Head | None
    outcome: bool
    aggregate: str
    about: str


def _plan(spec: RewardSpec) -> _Plan:
    from tilebeam.scoring.reward_heads import load_head

    assert spec.path is not None
    path = Path(spec.path)
    facts = _facts(path)
    if isinstance(spec.head, tuple):
        raise TilebeamError("A reward model has one head: several are for the generators' own hidden states.")
    usual = path.with_name(f"{path.stem}.head.gguf")
    loaded = load_head(spec.head or usual) if spec.head or usual.is_file() else None
    name = spec.preset or facts.get("preset") or preset_of(f"{facts.get('name', '')} {path.name}")
    name = name or (loaded.preset if loaded else None)
    chosen = preset(name) if name else Preset("token", RewardFormat(), "plain text")
    kind = spec.kind or facts.get("kind") or (chosen.kind if name else _kind(spec, path, facts, loaded))
    if kind not in KINDS:
        raise TilebeamError(f"Unknown kind of reward model {kind!r}: choose from {', '.join(KINDS)}.")
    chosen = replace(chosen, kind=cast(Kind, kind), **_labels(spec, facts))
    tag = facts.get("tag") if spec.tag is None else spec.tag
    if tag is not None:
        chosen = replace(chosen, format=replace(chosen.format, tag=tag))
    if kind == "token" and not chosen.format.tag:
        raise TilebeamError("A reward model that answers with tokens needs a tag or a preset.")
    if spec.head and kind in ("token", "classifier"):
        raise TilebeamError(f"{path} is a reward model of the kind {kind}, which does not use the head {spec.head}.")
    head = _head(path, kind, chosen, loaded)
    if not spec.outcome and chosen.outcome:
        raise TilebeamError(
            f"The preset {name} is for outcome reward models: load the model with outcome=True (--orm on the command "
            "line)."
        )
    # A process reward model stands in for an outcome reward model by its verdict on the last step.
    outcome = spec.outcome and (chosen.outcome or name is None)
    about = f"{'outcome' if spec.outcome else 'process'} reward model, {kind}"
    about += f", preset {name}" if name else ""
    return _Plan(path, chosen, head, outcome, "last" if spec.outcome else spec.aggregate, about)


def _kind(spec: RewardSpec, path: Path, facts: dict[str, Any], head: Head | None) -> Kind:
    """Find the kind of a model that says neither kind nor preset."""
    if facts["classifier"] and not spec.head:
        return "classifier"
    if head is not None:
        return "two-label" if head.output == "softmax" else "value-head"
    if spec.tag or facts.get("tag"):
        return "token"
    raise TilebeamError(
        f"{path} does not say what kind of reward model it is: name its preset ({', '.join(PRESETS)}), or its kind, "
        "tag and labels (on the command line --reward-preset, --reward-kind, --reward-tag, --reward-labels)."
    )


def _head(path: Path, kind: str, chosen: Preset, head: Head | None) -> Head | None:
    """Return the head that a kind needs, None if it needs none."""
    from tilebeam.scoring.reward_heads import classifier_of

    if kind == "token":
        return None
    if kind == "classifier":
        return classifier_of(path)
    if head is None:
        raise TilebeamError(
            f"A reward model of the kind {kind} needs its head's weights: name the head's file, or put it beside the "
            f"model as {path.stem}.head.gguf. `tilebeam reward-head` takes it out of the published files."
        )
    if kind == "two-label":
        return replace(head, output="softmax", label=chosen.label)
    if head.output == "softmax":
        raise TilebeamError(f"{path}'s head has {head.shape} values: it is a head over labels, of the kind two-label.")
    return replace(head, output=chosen.output if chosen.output in ("sigmoid", "none") else head.output)


def _facts(path: Path) -> dict[str, Any]:
    """Read what a model's file says of itself as a reward model."""
    from tilebeam import gguf as gguf_tools
    from tilebeam.model.classifier import CLASSIFIER
    from tilebeam.scoring.reward_heads import PREFIX

    if not path.is_file():
        raise TilebeamError(f"The reward model {path} does not exist.")
    with gguf_errors(f"{path} cannot be loaded as a reward model"), gguf_tools.open_gguf(path) as file:
        facts: dict[str, Any] = {
            key.removeprefix(PREFIX): kv.value for key, kv in file.kv.items() if key.startswith(PREFIX)
        }
        for key in ("general.basename", "general.name"):
            if key in file.kv:
                facts["name"] = file.kv[key].value
        facts["classifier"] = CLASSIFIER in file.tensors
    wrong = [k for k in ("kind", "preset", "tag", "good", "bad") if not isinstance(facts.get(k, ""), str)]
    if wrong:
        raise TilebeamError(f"{path}: {PREFIX}{wrong[0]} is not a string.")
    return facts


def _labels(spec: RewardSpec, facts: dict[str, Any]) -> dict[str, Any]:
    if spec.labels is None:
        return {k: facts[k] for k in ("good", "bad") if k in facts}
    if isinstance(spec.labels, str) or len(spec.labels) != 2 or not all(spec.labels):
        raise TilebeamError(f"A reward model has two labels, a good and a bad one, not {spec.labels!r}.")
    good, bad = spec.labels
    return {"good": good, "bad": bad}
