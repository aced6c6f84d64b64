"""The options with which commands take a reward model, and what becomes of them: one scorer, loaded and checked.

A command takes the group `RewardModelOptions`, reads it before anything long is run, and opens the scorer around its
work:

    with open_scorer(reward.read(), lm, n_ctx=4096, n_seq_max=16, device="npu") as scorer:

What the options leave open is found in the files, see `tilebeam.scoring.load_reward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.errors import TilebeamError
from tilebeam.gguf.option_groups import option
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.reward_formats import KINDS, PRESETS
from tilebeam.scoring.scoring_defaults import AGGREGATION, STEP_STOP, Aggregation, Kind
from tilebeam.text_files import escaped, unescaped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

_shared = partial(typer.Option, rich_help_panel="Reward model")
_option = partial(option, rich_help_panel="Reward model")


StepStop = Annotated[str, _shared("--step-stop", help="Text that ends a step (\\n allowed).")]
STEP_STOP_TEXT = escaped(STEP_STOP)  # as it is typed


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """A reward model: options of a command, see `grouped`."""

    prm: Path | None = _option(None, help="Process reward model: a GGUF file that rates every step.")
    orm: Path | None = _option(None, help="Outcome reward model: a GGUF file that rates whole texts.")
    reward_kind: Kind | None = _option(
        None,
        help="How the reward model gives its verdict; default: found in the files. "
        + " ".join(f"{name}: {about}." for name, about in KINDS.items()),
    )
    reward_preset: str | None = _option(
        None, help=f"Format of the reward model's input: {', '.join(PRESETS)}; default: by the model's name."
    )
    reward_head: list[Path] | None = _option(
        None,
        help="With --prm or --orm: weights of its head, from tilebeam reward-head; default: MODEL.head.gguf. Without "
        "them: a head or adapter of the model's own, from tilebeam reward; repeat for several models.",
    )
    reward_tag: str | None = _option(None, help="What ends every step, where the verdict is read (\\n allowed).")
    reward_labels: str | None = _option(None, help="The good and the bad label token, as in '+,-' (kind token).")
    aggregate: Aggregation = _option(AGGREGATION, help="How the scores of a text's steps become one.")

    def read(self) -> RewardSpec | None:
        """Return the reward model that they describe, None if they name none.

        Raises:
            TilebeamError: they cannot work, as far as the files tell.
        """
        if self == RewardModelOptions():
            return None
        of_head_alone = RewardModelOptions(reward_head=self.reward_head, aggregate=self.aggregate)
        if not (self.prm or self.orm or (self.reward_head and self == of_head_alone)):
            raise TilebeamError("Reward model options need a reward model: use --prm or --orm.")
        if self.prm is not None and self.orm is not None:
            raise TilebeamError("Give one reward model, either with --prm or with --orm.")
        several = tuple(self.reward_head or ())
        spec = RewardSpec(
            path=self.prm or self.orm,
            outcome=self.orm is not None,
            kind=self.reward_kind,
            preset=self.reward_preset,
            head=several if len(several) > 1 else next(iter(several), None),
            tag=None if self.reward_tag is None else unescaped(self.reward_tag),
            labels=None if self.reward_labels is None else _labels(self.reward_labels),
            aggregate=self.aggregate,
        )
        spec.check()
        return spec


def _labels(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if len(parts) != 2 or not all(parts):
        raise TilebeamError(f"--reward-labels takes two labels, good and bad, as in '+,-', not {text!r}.")
    return parts


@contextmanager
def open_scorer(spec: RewardSpec, lm: LM, **options: Any) -> Iterator[RewardModel | OwnReward]:
    """Load the reward model beside a generator, print what was loaded, and close it afterwards.

    Args:
        spec: which.
        lm: the generator.
        options: further arguments of `tilebeam.load_reward_model`.
    """
    with console.loading(str(spec.path or spec.head)) as show:
        scorer = spec.open(lm, **options | ({"progress": show} if spec.path else {}))
    with scorer:
        console.err().print(console.about_reward(scorer), style="dim", highlight=False)
        yield scorer
