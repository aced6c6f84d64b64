"""The options with which commands take a reward model, and what becomes of them: one scorer, loaded and checked.

A command takes the group `RewardModelOptions`, reads it, and opens the scorer around its work, before anything long is
run:

    with open_scorer(reward.read(), n_ctx=4096, n_seq_max=16, device="npu") as scorer:

What the options leave open is found in the file's metadata (reward.kind, .preset, .tag, .good, .bad), in the classifier
that the file holds, in a head file that lies beside it (MODEL.head.gguf, .npz or .npy), or in the preset that its name
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from tilebeam.cli import console
from tilebeam.errors import TilebeamError
from tilebeam.scoring.reward_formats import KINDS, PRESETS, Kind, Preset, RewardFormat, preset, preset_of
from tilebeam.text_files import unescaped

# What needs numpy is imported when a reward model is opened: `--help` is quick.
if TYPE_CHECKING:
    from tilebeam.scoring.reward_heads import Head
    from tilebeam.scoring.reward_model import RewardModel

_PANEL = "Reward model"
_SEQUENCES = 127  # more would not make the engine keep more: llama.cpp has 256 at most


class RewardKindName(StrEnum):
    """How a reward model gives its verdict."""

    token = "token"
    value_head = "value-head"
    two_label = "two-label"
    classifier = "classifier"


class AggregateName(StrEnum):
    """How the scores of steps become one."""

    last = "last"
    min = "min"
    prod = "prod"
    mean = "mean"


assert {k.value for k in RewardKindName} == set(get_args(Kind))

Prm = Annotated[
    Path | None,
    typer.Option("--prm", help="Process reward model: a GGUF file that rates every step.", rich_help_panel=_PANEL),
]
Orm = Annotated[
    Path | None,
    typer.Option("--orm", help="Outcome reward model: a GGUF file that rates whole texts.", rich_help_panel=_PANEL),
]
RewardKind = Annotated[
    RewardKindName | None,
    typer.Option(
        "--reward-kind",
        help="How it gives its verdict; default: found in the files. "
        + " ".join(f"{name}: {about}." for name, about in KINDS.items()),
        rich_help_panel=_PANEL,
    ),
]
RewardPreset = Annotated[
    str | None,
    typer.Option(
        "--reward-preset",
        help=f"How it wants its text, by name: {', '.join(PRESETS)}; default: told by the model's name.",
        rich_help_panel=_PANEL,
    ),
]
RewardHead = Annotated[
    Path | None,
    typer.Option(
        "--reward-head",
        help="Weights of its head: .gguf (from tilebeam reward-head), .npz or .npy; default: MODEL.head.*.",
        rich_help_panel=_PANEL,
    ),
]
RewardTag = Annotated[
    str | None,
    typer.Option(
        "--reward-tag", help="What ends every step, where the verdict is read (\\n allowed).", rich_help_panel=_PANEL
    ),
]
RewardLabels = Annotated[
    str | None,
    typer.Option(
        "--reward-labels", help="The good and the bad label token, as in '+,-' (kind token).", rich_help_panel=_PANEL
    ),
]
Aggregate = Annotated[
    AggregateName,
    typer.Option("--aggregate", help="How the scores of a text's steps become one.", rich_help_panel=_PANEL),
]


@dataclass(frozen=True)
class RewardOptions:
    """What a user said of a reward model.

    Attributes:
        prm, orm: the file; one of them, or neither if no reward model is wanted.
        kind: how it gives its verdict, None to find out.
        preset: a name of `PRESETS`, None to find out.
        head: its head's file.
        tag, labels: instead of the preset's; labels as "good,bad".
        aggregate: of the steps' scores.
    """

    prm: Path | None = None
    orm: Path | None = None
    kind: str | None = None
    preset: str | None = None
    head: Path | None = None
    tag: str | None = None
    labels: str | None = None
    aggregate: str = "last"

    @property
    def given(self) -> bool:
        """Whether there is a reward model."""
        return self.prm is not None or self.orm is not None

    def check(self) -> None:
        """Raise `TilebeamError` if this cannot work, as far as the files tell without the model being loaded."""
        if self.given:
            _plan(self)
        elif any((self.kind, self.preset, self.head, self.tag, self.labels)):
            raise TilebeamError("There are options for a reward model, but none is given: use --prm or --orm.")


@dataclass(frozen=True)
class RewardModelOptions:
    """A reward model: options of a command, see `grouped`."""

    prm: Prm = None
    orm: Orm = None
    reward_kind: RewardKind = None
    reward_preset: RewardPreset = None
    reward_head: RewardHead = None
    reward_tag: RewardTag = None
    reward_labels: RewardLabels = None
    aggregate: Aggregate = AggregateName.last

    def read(self) -> RewardOptions:
        """What they mean.

        Raises:
            TilebeamError: they cannot work.
        """
        options = RewardOptions(
            prm=self.prm,
            orm=self.orm,
            kind=self.reward_kind.value if self.reward_kind else None,
            preset=self.reward_preset,
            head=self.reward_head,
            tag=self.reward_tag,
            labels=self.reward_labels,
            aggregate=self.aggregate.value,
        )
        options.check()
        if not options.given and options.aggregate != "last":
            raise TilebeamError("--aggregate is for the steps of a reward model, but none is given: use --prm.")
        return options


@contextmanager
def open_scorer(
    options: RewardOptions,
    *,
    step_stop: str = "\n",
    question: Callable[[str], str] | None = None,
    n_ctx: int = 4096,
    n_seq_max: int = 16,
    **load: Any,
) -> Iterator[RewardModel]:
    """The scorer that the options describe; its model is closed afterwards.

    Args:
        options: with a model.
        step_stop: what ends a step of the texts that it will rate.
        question: from a search's prompt to the question in it, where a chat template stands around that.
        n_ctx: of the search's own model; the reward model gets room for the tags, too.
        n_seq_max: at least; sequences cost little, and many let the cells of many beams be kept.
        load: further arguments of `tilebeam.load`: device, threads, executor ...

    Raises:
        TilebeamError: the files or options do not fit each other or this model.
    """
    import tilebeam

    plan = _plan(options)  # what can be wrong is found before the model is loaded
    with console.loading(str(plan.path)):
        lm = tilebeam.load(plan.path, n_ctx=n_ctx + n_ctx // 2, n_seq_max=max(n_seq_max, _SEQUENCES), **load)
    with lm:
        scorer = plan.scorer(lm, step_stop, question)
        console.err().print(f"{console.about(lm)}; {plan.about}", style="dim", highlight=False)
        yield scorer


@dataclass(frozen=True)
class _Plan:
    """Options and what the files say, made one."""

    path: Path
    preset: Preset
    head: Head | None
    outcome: bool
    aggregate: str
    about: str

    def scorer(self, lm: Any, step_stop: str, question: Callable[[str], str] | None) -> RewardModel:
        from tilebeam.scoring.reward_model import HeadReward, TokenReward

        p = self.preset
        common: dict[str, Any] = {
            "format": p.format,
            "outcome": self.outcome,
            "aggregate": self.aggregate,
            "step_stop": step_stop,
        }
        if self.head is None:
            return TokenReward(lm, good=p.good, bad=p.bad, template=question, **common)
        return HeadReward(lm, self.head, question=question, **common)


def _plan(options: RewardOptions) -> _Plan:
    from tilebeam.scoring.reward_heads import load_head

    if (options.prm is None) == (options.orm is None):
        raise TilebeamError("Give one reward model, either with --prm or with --orm.")
    path = options.prm or options.orm
    assert path is not None
    facts = _facts(path)
    beside = options.head or _head_beside(path)
    name = options.preset or facts.get("preset") or preset_of(f"{facts.get('name', '')} {path.name}")
    if name is None and beside is not None and beside.suffix == ".gguf":
        name = load_head(beside).preset
    chosen = preset(name) if name else Preset("token", RewardFormat(), "plain text")
    kind = options.kind or facts.get("kind")
    if kind is None:
        if name is not None:
            kind = chosen.kind
        elif facts["classifier"]:
            kind = "classifier"
        elif beside is not None:
            kind = "two-label" if load_head(beside).output == "softmax" else "value-head"
        elif options.tag or facts.get("tag"):
            kind = "token"
        else:
            raise TilebeamError(
                f"{path} does not say what kind of reward model it is: name a preset (--reward-preset "
                f"{', '.join(PRESETS)}), or its kind and tag (--reward-kind, --reward-tag, --reward-labels)."
            )
    if kind not in KINDS:
        raise TilebeamError(f"There is no kind of reward model {kind!r}; there are {', '.join(KINDS)}.")
    chosen = replace(chosen, kind=cast(Kind, kind), **_labels(options, facts))
    chosen = replace(chosen, format=_tagged(chosen.format, options, facts))
    if kind == "token" and not chosen.format.tag:
        raise TilebeamError("A reward model that answers with tokens needs a tag: --reward-tag or --reward-preset.")
    head = _head(path, kind, chosen, beside)
    if options.prm is not None and chosen.outcome:
        raise TilebeamError(f"The preset {name} is of outcome reward models: give the model with --orm.")
    # A process reward model stands in for an outcome reward model by its verdict on the last step.
    outcome = options.orm is not None and (chosen.outcome or name is None)
    aggregate = "last" if options.orm is not None else options.aggregate
    about = f"{'process' if options.orm is None else 'outcome'} reward model, {kind}"
    about += f", preset {name}" if name else ""
    return _Plan(path, chosen, head, outcome, aggregate, about)


def _head(path: Path, kind: str, chosen: Preset, beside: Path | None) -> Head | None:
    """The head that a kind needs, None if it needs none."""
    from tilebeam.scoring.reward_heads import classifier_of, load_head

    if kind == "token":
        return None
    if kind == "classifier":
        return classifier_of(path)
    if beside is None:
        raise TilebeamError(
            f"A reward model of the kind {kind} needs its head's weights: --reward-head FILE, or {path.stem}.head.gguf "
            "beside the model. `tilebeam reward-head` takes them out of the published files."
        )
    if kind == "two-label":
        return load_head(beside, "softmax", chosen.label)
    head = load_head(beside, chosen.output if chosen.output != "softmax" else None)
    if head.output == "softmax":
        raise TilebeamError(f"{beside} has {head.shape} values: that is a head over labels, --reward-kind two-label.")
    return head


def _facts(path: Path) -> dict[str, Any]:
    """What a model's file says of itself as a reward model."""
    from tilebeam import gguf as gguf_tools
    from tilebeam.scoring.reward_heads import CLASSIFIER, PREFIX

    if not path.is_file():
        raise TilebeamError(f"The reward model {path} does not exist.")
    try:
        with gguf_tools.open_gguf(path) as file:
            facts: dict[str, Any] = {
                key.removeprefix(PREFIX): kv.value for key, kv in file.kv.items() if key.startswith(PREFIX)
            }
            for key in ("general.basename", "general.name"):
                if key in file.kv:
                    facts["name"] = file.kv[key].value
            facts["classifier"] = CLASSIFIER in file.tensors
    except gguf_tools.GGUFError as error:
        raise TilebeamError(f"{path} cannot be loaded as a reward model: {error}") from None
    wrong = [k for k in ("kind", "preset", "tag", "good", "bad") if not isinstance(facts.get(k, ""), str)]
    if wrong:
        raise TilebeamError(f"{path}: {PREFIX}{wrong[0]} is no text.")
    return facts


def _head_beside(path: Path) -> Path | None:
    candidates = [path.with_name(f"{path.stem}.head{suffix}") for suffix in (".gguf", ".npz", ".npy")]
    return next((c for c in candidates if c.is_file()), None)


def _labels(options: RewardOptions, facts: dict[str, Any]) -> dict[str, Any]:
    if options.labels is None:
        return {k: facts[k] for k in ("good", "bad") if k in facts}
    parts = options.labels.split(",")
    if len(parts) != 2 or not all(parts):
        raise TilebeamError(f"--reward-labels takes two labels, good and bad, as in '+,-', not {options.labels!r}.")
    return {"good": parts[0], "bad": parts[1]}


def _tagged(form: RewardFormat, options: RewardOptions, facts: dict[str, Any]) -> RewardFormat:
    if options.tag is not None:
        return replace(form, tag=unescaped(options.tag))
    return replace(form, tag=facts["tag"]) if "tag" in facts else form
