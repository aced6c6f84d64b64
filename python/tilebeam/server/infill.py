"""The bodies of /infill, in llama-server's form, and what is made of an answer for them."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from tilebeam.server.requests import CompletionRequest, Generation, Number, Strict, Text
from tilebeam.server.responses import Json

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
        """How long lines may take, None for ever."""
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
        """llama-server's sampler "infill" stands last; it prefers the shortest of tokens that begin alike."""
        return value[:-1] if isinstance(value, list) and value[-1:] == ["infill"] else value

    @model_validator(mode="after")
    def _infill_fits_together(self) -> InfillRequest:
        if self.stream or self.samples > 1 or self.search is not None:
            raise ValueError("/infill answers with one text; suffix of /v1/completions does more")
        return self

    def completion(self) -> Filling:
        """The same as a request of /v1/completions."""
        own = {"input_prefix", "input_suffix", "input_extra", "prompt", "n_indent", "response_fields"}
        fields = self.model_dump(exclude=own, by_alias=True)
        fields |= {"prompt": self.input_prefix + self.prompt, "suffix": self.input_suffix}
        fields["extra"] = [chunk.model_dump() for chunk in self.input_extra or ()]
        limit = self.limit(None)
        limits = {"max_tokens": limit, "n_predict": -1 if limit is None else None}
        return Filling.model_validate(fields | limits)

    def indented(self, text: str) -> str:
        """A text up to the first line behind a line's end that is indented by less than `n_indent` characters."""
        at = text.find("\n") + 1
        while self.n_indent and at:
            line = text[at:]
            blank = len(line) - len(line.lstrip(" \t"))
            if blank < min(self.n_indent, len(line)):
                return text[: at + blank]
            at = text.find("\n", at) + 1
        return text

    def asked(self, answer: Json) -> Json:
        """The fields of an answer that `response_fields` names, all if it is not there."""
        if self.response_fields is None:
            return answer
        return {name: answer[name] for name in self.response_fields if name in answer}
