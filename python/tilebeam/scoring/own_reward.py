"""A reward head on the generator's own hidden states: decoding produced them, so that a rating decodes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.gguf.closing import Closing
from tilebeam.outputs import CompletionOutput
from tilebeam.prompt import Prompt
from tilebeam.scoring.reward_heads import Head, place
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scorers import Rating
from tilebeam.scoring.scoring_defaults import AGGREGATION, STEP_STOP, Aggregation
from tilebeam.text_state import width

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.text_state import TextState


class OwnReward(StepScorer, Closing):
    """Rates texts by the hidden states that the model computed while it wrote them.

    A text is rated by the hidden states of its tokens (`tilebeam.text_state.TextState`), which samples carry if they
    are drawn with ``SamplingParams(hidden=True)``; searches ask for them. No token is decoded for it. Several threads
    may use one.

    Args:
        lm: the model that writes the texts; it stays the caller's.
        head: what `tilebeam reward train` made for this model.
        aggregate, step_stop: see `StepScorer`. With "last", the default, the state at a text's end counts.

    Attributes:
        about: one line about how it judges.

    Raises:
        TilebeamError: the head was made for another model, or for hidden states at single positions.
    """

    needs_hidden = True

    def __init__(self, lm: LM, head: Head, *, aggregate: Aggregation = AGGREGATION, step_stop: str = STEP_STOP) -> None:
        super().__init__(aggregate=aggregate, step_stop=step_stop)
        check_own(head)
        check_maker(head, lm)
        if head.layer != lm.info.hidden_layer and head.n_embd:
            raise TilebeamError(
                f"The reward head reads hidden states behind {place(head.layer)}, the model was loaded for those "
                f"behind {place(lm.info.hidden_layer)}: load it with hidden_layer={head.layer}."
            )
        self.lm = lm
        self.head = head
        self.about = f"its own reward head on {head.reads}"

    @property
    def hidden_steps(self) -> str:
        """Return what ends the steps whose states are wanted; "" if the end of a text is enough."""
        return "" if self.aggregate == "last" else self.step_stop

    def score_steps(
        self,
        prompts: Sequence[str | Prompt],  # noqa: ARG002
        solutions: Sequence[Sequence[str]],  # noqa: ARG002
    ) -> list[list[float]]:
        """Refuse: a text alone has no hidden states."""
        raise TilebeamError(
            "A reward head of the generator's own rates what the model writes, not given texts; a head for those needs "
            "a reward model."
        )

    def rate(self, prompts: Sequence[str | Prompt], groups: Sequence[Sequence[CompletionOutput]]) -> list[Rating]:
        """Return one score per candidate of each prompt."""
        flat = [self._states(candidate) for _, group in zip(prompts, groups, strict=True) for candidate in group]
        left = iter(self.rate_states(flat))
        return [Rating([self.total(next(left).scores) for _ in group]) for group in groups]

    def rate_states(self, solutions: Sequence[Sequence[TextState]]) -> list[Rating]:
        """Score every step of every solution by the states where they end."""
        flat = [state.features(self.head.features) for states in solutions for state in states]
        if not flat:
            return [Rating([]) for _ in solutions]
        values = self.head(np.stack(flat))
        if not np.isfinite(values).all():
            raise TilebeamError("The reward head computed values that are not numbers: the model's states are damaged.")
        left = iter(values.tolist())
        return [Rating([next(left) for _ in states]) for states in solutions]

    def _states(self, candidate: CompletionOutput) -> list[TextState]:
        """Return the states where its steps end, the end of the text the last of them."""
        if candidate.hidden is None:
            raise TilebeamError("A candidate has no hidden states: sample with SamplingParams(hidden=True).")
        if not self.hidden_steps:
            return [candidate.hidden]
        if candidate.hidden_steps is None:
            raise TilebeamError("A candidate has no states of its steps: sample with SamplingParams(hidden_steps=..).")
        begun = [s for s in candidate.hidden_steps if 0 < s.count < candidate.hidden.count]
        return [*begun, candidate.hidden]

    def close(self) -> None:
        """Close nothing: the model is the caller's."""


# Words for how a file's weights are stored.
_FORMATS = re.compile(r"(?<![a-z0-9.])(gguf|awq|gptq|hf|i?q\d(_[a-z0-9]+)*|(fp|f|bf|int)\d+)(?![a-z0-9.])")


def check_own(head: Head) -> None:
    """Raise `TilebeamError` if a head does not read the states of whole texts."""
    if not head.features and head.adapter is None:
        raise TilebeamError(
            "This reward head reads hidden states at single positions, of a reward model (--prm, --orm); a head for "
            "the generator itself comes from `tilebeam reward train`."
        )


def maker_of(lm: LM) -> dict[str, str]:
    """Describe a model as the file of its head does: by "name" and "shape"."""
    shape = f"{lm.n_layer} layers, {lm.n_embd} elements, {lm.n_vocab} tokens"
    return {"name": lm.metadata.get("general.name", ""), "shape": shape}


def check_maker(head: Head, lm: LM) -> None:
    """Raise `TilebeamError` if a head was made for another model. Another quantization of the same model will do."""
    wanted, found = head.maker, maker_of(lm)
    if head.n_inputs != (width(head.features, lm.n_embd) or lm.n_embd) or not _same_maker(wanted, found):
        made_for = " of ".join(filter(None, (wanted.get("name"), wanted.get("shape"))))
        raise TilebeamError(
            f"The reward head was made for another model: {made_for or f'{head.n_embd} elements'}; this one is "
            f"{' of '.join(filter(None, found.values()))}. Train one for it with `tilebeam reward train`."
        )


def _same_maker(wanted: Mapping[str, str], found: Mapping[str, str]) -> bool:
    names = [_plain(facts.get("name", "")) for facts in (wanted, found)]
    return wanted.get("shape", found["shape"]) == found["shape"] and not (all(names) and names[0] != names[1])


def layer_for(path: str | os.PathLike[str], heads: Sequence[Head]) -> int | None:
    """Return the ``hidden_layer`` to load a model with for the head that was made for it, by the model's name; None
    also if none was: then the loaded model says so.

    Args:
        path: the model's file.

    Raises:
        TilebeamError: it is no model.
    """
    from tilebeam import gguf as gguf_tools

    if all(head.layer is None for head in heads):
        return None
    with gguf_errors(f"{path} cannot be loaded"), gguf_tools.open_gguf(path) as gguf:
        name = gguf_tools.value_of(gguf_tools.model_kv(gguf), "general.name")
    found = {"name": "" if name is None else str(name), "shape": ""}
    return next((h.layer for h in heads if _same_maker({"name": h.maker.get("name", "")}, found)), None)


def made_for(lm: LM, heads: Sequence[Head]) -> Head:
    """Choose the head that was made for a model.

    Raises:
        TilebeamError: none of them was.
    """
    for head in heads[:-1]:
        with suppress(TilebeamError):
            check_maker(head, lm)
            return head
    check_maker(heads[-1], lm)
    return heads[-1]


def _plain(name: str) -> str:
    """Keep of a name what does not differ between files of one model: neither how words are joined nor the format."""
    return re.sub(r"[^a-z0-9.]+", "", _FORMATS.sub("", name.lower()))
