"""A request between its body and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.prepared import PreparedChat
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.answer_events import SampleEvents, TokenBytes
from tilebeam.server.requests import Generation
from tilebeam.server.writing import Answer

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


@dataclass(frozen=True)
class AnswerPlan:
    """A request, checked as far as that takes no model.

    Attributes:
        body: as it came.
        answer: makes the writer of its answer.
        logprobs: it tells log-probabilities.
        params: how to sample, with a seed.
        samples: texts that it draws.
        model: its name in the answer.
        prepare: makes it ready for a model; takes its time.
    """

    body: Generation
    answer: AnswerMaker
    logprobs: bool
    params: SamplingParams
    samples: int
    model: str
    prepare: Callable[[LM, SamplingParams], Ready]


# Makes the writer of an answer, of the request and a function that spells tokens.
AnswerMaker = Callable[[AnswerPlan, TokenBytes], Answer]


@dataclass(frozen=True)
class Ready:
    """What a model is asked.

    Attributes:
        prompts: what it reads.
        params: how to sample.
        reader: makes a reader of one answer, or None: all of it is text.
        chat: whose answers a search compares by their calls.
    """

    prompts: list[Prompt]
    params: SamplingParams
    reader: Callable[[], AnswerReader | None] = field(default=lambda: None)
    chat: PreparedChat | None = None

    def events_of(self, index: int, lm: LM, plan: AnswerPlan, *, logprobs: bool = True) -> SampleEvents:
        """Return what makes events of a sample.

        Args:
            index: of its choice.
            lm: the model.
            plan: the request.
            logprobs: log-probabilities are known.
        """
        shown = set(self.params.shown_tokens)

        @cache  # the same tokens are drawn again and again
        def piece(token: int) -> bytes:
            return lm.spelling(token) if token in shown else lm.piece(token)

        return SampleEvents(index, piece, logprobs=plan.logprobs and logprobs, reader=self.reader())
