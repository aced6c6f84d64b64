"""What is served: model files, their reward model, and how all of it is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilebeam.model.loader import load
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.server.logs import tell
from tilebeam.server.model_host import LoadedModel

if TYPE_CHECKING:
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel


@dataclass(frozen=True)
class ServedModel:
    """A model and its reward model, and how they are loaded, again if they are lost.

    Attributes:
        names: what it may be called in requests; the first is its name in answers.
        path: the model's file.
        load: further arguments of `tilebeam.load`, for both.
        reward: the reward model, None for none.
        step_stop: what ends a step of the texts that it rates.
        own: arguments for the model alone: its adapters, its draft model.
        cache_prompt: KV cells of finished requests stay while there is room, for those that begin alike: a
            conversation's next turn.
    """

    names: tuple[str, ...]
    path: str
    load: Mapping[str, Any]
    reward: RewardSpec | None
    step_stop: str
    own: Mapping[str, Any] = field(default_factory=dict)
    cache_prompt: bool = True

    def open(self) -> LoadedModel:
        """Load them.

        Raises:
            TilebeamError: one of them cannot be loaded.
        """
        began = time.monotonic()
        tell("loading", model=self.names[0])
        with ExitStack() as stack:
            layer = None if self.reward is None else self.reward.hidden_layer(self.path)
            lm = stack.enter_context(load(self.path, **self.own, **self.load, hidden_layer=layer))
            if self.cache_prompt and lm.info.generates:
                stack.enter_context(lm.keep_prefixes())
            scorer: RewardModel | OwnReward | None = None
            if self.reward is not None:
                scorer = self.reward.open(lm, step_stop=self.step_stop, **self.load)
                stack.callback(scorer.close)
            tell("loaded", model=self.names[0], seconds=round(time.monotonic() - began, 3))
            return LoadedModel(lm, scorer, stack.pop_all())
