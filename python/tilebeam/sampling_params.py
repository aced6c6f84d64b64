"""How tokens are drawn: one small dataclass, checked before anything runs."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

from tilebeam.checks import is_finite, is_whole
from tilebeam.errors import TilebeamError

# Seeds of samples are below this.
_SEEDS = 2**32 - 1


@runtime_checkable
class HasSchema(Protocol):
    """What tells its JSON schema: a class of pydantic's."""

    def model_json_schema(self) -> Mapping[str, Any]:
        """The schema."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """What to generate for one prompt.

    Attributes:
        n: samples per prompt; they share the prompt's KV cells.
        temperature: 0 is greedy decoding.
        top_k: keep the k most likely tokens; 0 keeps all. The default is llama.cpp's; with large vocabularies it also
            makes sampling much cheaper.
        top_p: keep the smallest set of tokens whose probabilities add up to this; 1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
        repeat_penalty, frequency_penalty, presence_penalty: as in llama.cpp, over the last ``penalty_last_n`` tokens
            of prompt and text; 1, 0 and 0 are off.
        max_tokens: at most this many tokens per sample; None: until the context is full.
        min_tokens: no token ends a sample before it has so many; stop strings do.
        stop: strings that end a sample, None: none. The text is cut before the string, also when it spans tokens.
        stop_tokens: tokens that end a sample as the model's own end tokens do; the text does not hold them.
        seed: sample ``i`` draws with seed ``(seed + i) mod (2**32 - 1)``, whatever other prompts are in the call.
            None draws a fresh one, which `RequestOutput.seed` tells. It repeats a text if the model was loaded with
            ``deterministic=True``; else only where guessing is off and the same runs beside it.
        ignore_eos: go on after an end-of-generation token (for measurements).
        logprobs: fill in ``logprobs`` and ``cumulative_logprob``: natural logarithms of the model's own
            probabilities of the sampled tokens, before temperature and truncation. Costs one pass over the
            vocabulary per token.
        top_logprobs: with ``logprobs``, also tell those of that many of the likeliest tokens at each position, at most
            the vocabulary; 0: none.
        grammar: a GBNF grammar whose `root` the text must match; a sample ends when its text is complete. None: any
            text. Checked before anything is decoded.
        json_schema: the text is JSON that is valid under this schema: a dict, JSON text, or a class of pydantic's. A
            keyword that no grammar can keep is an error that names it.
        regex: the text matches this regular expression from its beginning to its end: characters, classes, groups,
            alternatives, repetitions; no look-around, no references. Of grammar, json_schema and regex only one.
        speculate: let a model that was loaded to speculate guess tokens ahead for this prompt (`tilebeam.load`). How a
            text is drawn does not depend on it; that the text is the same one needs ``deterministic=True``.
        hidden: fill in ``CompletionOutput.hidden``, what a reward head reads; the text does not depend on it.
        hidden_steps: and ``hidden_steps``, at the end of every step, which this string ends; "" for none.
        hidden_prompt: the prompt's last token counts as the first of the text, for texts that grow call by call.
        lora: scales of the LoRA adapters that the model was loaded with, in their order; 0 leaves one out, as does a
            list that is too short. None: as they were loaded. Prompts with other scales do not share batches or cells.
        logit_bias: added to the logits of tokens before anything else; ``-math.inf`` bans one.
        spelled: control tokens that the text shows, as a template spells them; others are no text.
    """

    n: int = 1
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_tokens: Sequence[int] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    grammar: str | None = None
    json_schema: Mapping[str, Any] | bool | str | HasSchema | None = field(default=None, hash=False)
    regex: str | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    lora: Sequence[float] | None = None
    speculate: bool = True
    hidden: bool = False
    hidden_steps: str = ""
    hidden_prompt: bool = False
    spelled: Sequence[int] = ()

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, HasSchema):
            object.__setattr__(self, "json_schema", self.json_schema.model_json_schema())
        for name in ("stop", "stop_tokens", "spelled", "lora"):  # tuples, so that parameters can be hashed
            given = getattr(self, name)
            if given is None and name != "lora":
                object.__setattr__(self, name, ())
            elif isinstance(given, str):
                object.__setattr__(self, name, (given,))
            elif isinstance(given, Iterable) and not isinstance(given, Mapping):
                object.__setattr__(self, name, tuple(given))
        self.validate()

    def validate(self) -> None:
        """Raise `TilebeamError` naming the first field that is out of range."""

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise TilebeamError(f"SamplingParams: {what}.")

        need(is_whole(self.n) and self.n >= 1, f"n must be a whole number of at least 1, not {self.n!r}")
        need(
            is_finite(self.temperature) and self.temperature >= 0, f"temperature must be >= 0, not {self.temperature!r}"
        )
        need(
            is_whole(self.top_k) and 0 <= self.top_k < 2**31,
            f"top_k must be a whole number, 0 for all, not {self.top_k!r}",
        )
        need(is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p!r}")
        need(is_finite(self.min_p) and 0 <= self.min_p < 1, f"min_p must be in [0, 1), not {self.min_p!r}")
        need(
            is_finite(self.repeat_penalty) and self.repeat_penalty > 0,
            f"repeat_penalty must be > 0, not {self.repeat_penalty!r}",
        )
        need(is_finite(self.frequency_penalty), f"frequency_penalty must be a number, not {self.frequency_penalty!r}")
        need(is_finite(self.presence_penalty), f"presence_penalty must be a number, not {self.presence_penalty!r}")
        need(
            is_whole(self.penalty_last_n) and 0 <= self.penalty_last_n < 2**31,
            f"penalty_last_n must be a whole number, 0 for none, not {self.penalty_last_n!r}",
        )
        need(
            self.max_tokens is None or (is_whole(self.max_tokens) and self.max_tokens >= 1),
            f"max_tokens must be at least 1, or None, not {self.max_tokens!r}",
        )
        need(
            is_whole(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
            f"min_tokens must be a whole number up to max_tokens, not {self.min_tokens!r}",
        )
        need(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s != "" for s in self.stop),
            f"stop must hold strings that are not empty, not {self.stop!r}",
        )
        for name in ("stop_tokens", "spelled"):
            tokens = getattr(self, name)
            need(isinstance(tokens, tuple) and all(map(_is_token, tokens)), f"{name} must hold tokens, not {tokens!r}")
        need(
            self.seed is None or (is_whole(self.seed) and self.seed >= 0),
            f"seed must be >= 0 or None, not {self.seed!r}",
        )
        need(
            is_whole(self.top_logprobs) and self.top_logprobs >= 0,
            f"top_logprobs must be a whole number, 0 for none, not {self.top_logprobs!r}",
        )
        for name in ("ignore_eos", "logprobs", "speculate", "hidden", "hidden_prompt"):
            given = getattr(self, name)
            need(isinstance(given, bool), f"{name} must be True or False, not {given!r}")
        need(self.logprobs or not self.top_logprobs, "top_logprobs needs logprobs=True")
        need(
            self.lora is None or (isinstance(self.lora, tuple) and all(map(is_finite, self.lora))),
            f"lora must be a list of numbers, or None, not {self.lora!r}",
        )
        need(
            self.grammar is None
            or (isinstance(self.grammar, str) and self.grammar.strip() != "" and "\0" not in self.grammar),
            f"grammar must be a GBNF text, or None, not {self.grammar!r}",
        )
        need(
            self.regex is None or (isinstance(self.regex, str) and self.regex != ""),
            f"regex must be a regular expression, or None, not {self.regex!r}",
        )
        need(
            self.json_schema is None or _is_schema(self.json_schema),
            f"json_schema must be a JSON schema: a dict, JSON text or a pydantic model, not {self.json_schema!r}",
        )
        need(
            [self.grammar, self.json_schema, self.regex].count(None) >= 2,
            "grammar, json_schema and regex exclude each other",
        )
        need(
            not (self.constrained and (self.ignore_eos or self.min_tokens)),
            "ignore_eos or min_tokens with a grammar: a text that matches has to end",
        )
        need(isinstance(self.hidden_steps, str), f"hidden_steps must be a string, not {self.hidden_steps!r}")
        need(
            self.hidden or not (self.hidden_steps or self.hidden_prompt),
            "hidden_steps and hidden_prompt need hidden=True",
        )
        need(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            f"logit_bias must have a number for each of its tokens, as a dict, not {self.logit_bias!r}",
        )
        for token, bias in (self.logit_bias or {}).items():
            need(_is_token(token), f"logit_bias must be for tokens, not {token!r}")
            fits = bias == -math.inf or (is_finite(bias) and abs(bias) <= 1e6)
            need(fits, f"logit_bias must be numbers of at most a million, or -inf, not {bias!r}")

    @property
    def constrained(self) -> bool:
        """Whether the text has to match a grammar, a schema or a regular expression."""
        return self.grammar is not None or self.json_schema is not None or self.regex is not None

    @property
    def penalizes(self) -> bool:
        """Whether any of the repetition penalties is on."""
        on = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return on and self.penalty_last_n > 0

    def resolved(self) -> SamplingParams:
        """The same, with a seed."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(_SEEDS))

    def sample_seed(self, index: int) -> int:
        """The seed of sample ``index``; distinct for up to ``2**32 - 1`` samples."""
        if self.seed is None:
            raise TilebeamError("SamplingParams: no seed to derive from; call resolved() first.")
        return (self.seed + index) % _SEEDS


FIELDS = tuple(one.name for one in fields(SamplingParams))


def updated(
    sampling: SamplingParams | Sequence[SamplingParams] | None, changes: Mapping[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    """Parameters with some fields changed: those given by name to `LM.generate` and the like.

    Args:
        sampling: for all prompts, or one per prompt; None: the defaults.
        changes: values by the fields' names.

    Raises:
        TilebeamError: there is no such field, or its value is out of range.
    """
    for name in changes:
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, 1)
            hint = f"do you mean {near[0]!r}?" if near else f"there are {', '.join(FIELDS)}."
            raise TilebeamError(f"SamplingParams has no field {name!r}: {hint}")
    if sampling is None or isinstance(sampling, SamplingParams):
        return replace(sampling or SamplingParams(), **changes)
    return [replace(params, **changes) for params in sampling] if changes else sampling


def _is_token(value: object) -> bool:
    return isinstance(value, int) and is_whole(value) and value >= 0


def _is_schema(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, Mapping | bool)
