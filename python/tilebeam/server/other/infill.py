"""/infill, in llama-server's form: bodies, and how answers are written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field, field_validator, model_validator

from tilebeam.chat.answer_parts import text_in
from tilebeam.server.answer_events import Ended, Event, Grown, Json, TokenBytes
from tilebeam.server.requests import CompletionRequest, Generation, Number, Strict, Text
from tilebeam.server.writing import Answer

if TYPE_CHECKING:
    from tilebeam.server.plan import AnswerPlan

_MOST_TEXTS = 1024
_MOST_FIELDS = 64


class ExtraText(Strict):
    """A piece of another file, which the model reads first."""

    text: Text
    filename: Text = "tmp"
    time: Number | None = None  # when the editor noted it


class Filling(CompletionRequest):
    """A request of /v1/completions with what only /infill has."""

    extra: list[ExtraText] = Field(default_factory=list)
    t_max_predict_ms: Number | None = None

    @property
    def seconds(self) -> float | None:
        """Return how many seconds lines may take, None for ever."""
        limit = self.t_max_predict_ms or 0.0
        return limit / 1000 if limit > 0 else None


class InfillRequest(Generation):
    """POST /infill: what stands between input_prefix + prompt and input_suffix."""

    input_prefix: Text
    input_suffix: Text
    input_extra: list[ExtraText] | None = Field(None, max_length=_MOST_TEXTS)
    prompt: Text = ""
    n_indent: int | None = Field(None, ge=0)
    t_max_predict_ms: Number | None = None  # lines that begin later are not written; 0: no limit
    response_fields: list[Text] | None = Field(None, max_length=_MOST_FIELDS)

    @field_validator("samplers", mode="before")
    @classmethod
    def _without_infill(cls, value: object) -> object:
        """Drop llama-server's last sampler "infill", which prefers the shortest of tokens that begin alike."""
        return value[:-1] if isinstance(value, list) and value[-1:] == ["infill"] else value

    @model_validator(mode="after")
    def _infill_fits_together(self) -> InfillRequest:
        if self.stream or self.samples > 1 or self.search is not None:
            raise ValueError("/infill answers with one text; suffix of /v1/completions does more")
        return self

    def completion(self) -> Filling:
        """Return the same as a request of /v1/completions."""
        own = {"input_prefix", "input_suffix", "input_extra", "prompt", "n_indent", "response_fields"}
        fields = self.model_dump(exclude=own, by_alias=True)
        fields |= {"prompt": self.input_prefix + self.prompt, "suffix": self.input_suffix}
        fields["extra"] = [chunk.model_dump() for chunk in self.input_extra or ()]
        limit = self.limit(None)
        limits = {"max_tokens": limit, "n_predict": -1 if limit is None else None}
        return Filling.model_validate(fields | limits)

    def indented(self, text: str) -> str:
        """Return a text up to the first line behind a line's end that is indented by less than `n_indent`."""
        at = text.find("\n") + 1
        while self.n_indent and at:
            line = text[at:]
            blank = len(line) - len(line.lstrip(" \t"))
            if blank < min(self.n_indent, len(line)):
                return text[: at + blank]
            at = text.find("\n", at) + 1
        return text


class InfillAnswer(Answer):
    """Writes one text.

    Args:
        body: the request.
        plan: the completion that it asks for.
    """

    def __init__(self, body: InfillRequest, plan: AnswerPlan, _spelling: TokenBytes) -> None:
        self._body = body
        self._model = plan.model

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the fields that the request asks for."""
        _, grown, ended = events
        assert isinstance(grown, Grown)
        assert isinstance(ended, Ended)
        said = text_in(grown.parts)
        text = self._body.indented(said)
        cut = grown.finish == "length" or text != said
        answer = {
            "content": text,
            "stop": True,
            "stop_type": "limit" if cut else "eos" if grown.stop is None else "word",
            "stopping_word": "" if cut else grown.stop or "",
            "model": self._model,
            "tokens_predicted": ended.usage.completion_tokens,
            "tokens_evaluated": ended.usage.prompt_tokens,
            "tokens_cached": ended.usage.cached_tokens,
            "truncated": False,
        }
        asked = self._body.response_fields
        return answer if asked is None else {name: answer[name] for name in asked if name in answer}
