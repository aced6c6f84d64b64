"""Sampling parameters: one small dataclass, checked before anything runs."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import repeat
from typing import Any, Protocol, TypedDict, TypeVar, runtime_checkable

from tilebeam.checks import is_finite, is_integer
from tilebeam.errors import TilebeamError

T = TypeVar("T")
# Seeds of samples are below this.
_SEEDS = 2**32 - 1
# Room for a sentence that leads to an answer, and for an answer as long as MATH's.
ANSWER_TOKENS = 64


@runtime_checkable
class HasSchema(Protocol):
    """A class of pydantic's, or another that gives its JSON schema."""

    def model_json_schema(self) -> Mapping[str, Any]:
        """Return the schema."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of generation for one prompt.

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
        statistics: fill in ``entropies`` and ``certainties``: how sure the model was of each token. Costs about as much
            as logprobs.
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
        logit_bias: added to the logits of tokens before anything else; ``-math.inf`` bans one.
        shown_tokens: control tokens that the text shows, as a template spells them; others are no text.
        thinking_budget: tokens that the text may think, from the mark that opens its thoughts on: then
            ``budget_message`` and the closing mark are forced, and the model answers. 0 closes thoughts at once; None
            is no budget, nor is more than max_tokens. A grammar holds from the end of thoughts that the prompt has
            opened, here and with ``min_thinking``.
        budget_message: text that is forced before the closing mark, or with it, if it holds that mark.
        min_thinking: thoughts are not closed, and do not end the text, before they have so many tokens.
        thinking_marks: what opens and closes thoughts, as in ("<think>", "</think>"); None: what the model's chat
            template tells. Thoughts come first in a text, or the prompt has opened them.
        force_answer: text that is forced when only ``answer_tokens`` are left until max_tokens or the end of the
            context, such as "\\n\\nThe answer is \\\\boxed{"; thoughts are closed before. "": none. A text whose last
            thought has ended, and that holds the last word already ("\\\\boxed{"; all of it, where that is a plain
            word), is left alone.
        answer_tokens: with ``force_answer``, tokens for it and for what the model adds to it.
        continues: the last so many tokens of the prompt count as the beginning of the text, for texts that grow call by
            call: the fields from ``thinking_budget`` on count them.
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
    statistics: bool = False
    grammar: str | None = None
    json_schema: Mapping[str, Any] | bool | str | HasSchema | None = field(default=None, hash=False)
    regex: str | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    speculate: bool = True
    hidden: bool = False
    hidden_steps: str = ""
    hidden_prompt: bool = False
    shown_tokens: Sequence[int] = ()
    thinking_budget: int | None = None
    budget_message: str = ""
    min_thinking: int = 0
    thinking_marks: Sequence[str] | None = None
    force_answer: str = ""
    answer_tokens: int = ANSWER_TOKENS
    continues: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, HasSchema):
            object.__setattr__(self, "json_schema", ModelSchema.of(self.json_schema))
        # Tuples, so that parameters can be hashed.
        for name in ("stop", "stop_tokens", "shown_tokens", "thinking_marks"):
            given = getattr(self, name)
            if given is None and name != "thinking_marks":
                object.__setattr__(self, name, ())
            elif isinstance(given, str):
                object.__setattr__(self, name, (given,))
            elif isinstance(given, Iterable) and not isinstance(given, Mapping):
                object.__setattr__(self, name, tuple(given))
        self.validate()

    def validate(self) -> None:
        """Raise `TilebeamError` naming the first field that is out of range."""

        def refuse(wrong: object, sentence: str) -> None:
            if wrong:
                raise TilebeamError(f"SamplingParams: {sentence}.")

        for name, fits, must in _RULES:
            if not fits(value := getattr(self, name)):
                refuse(True, f"{name} must {must}, not {value!r}")
        for token, bias in (self.logit_bias or {}).items():
            refuse(not _is_token(token), f"logit_bias must be for tokens, not {token!r}")
            bounded = bias == -math.inf or (is_finite(bias) and abs(bias) <= 1e6)
            refuse(not bounded, f"logit_bias must be numbers of at most a million, or -inf, not {bias!r}")
        too_many = self.min_tokens > (self.max_tokens or self.min_tokens)
        refuse(too_many, f"min_tokens must be a whole number up to max_tokens, not {self.min_tokens!r}")
        refuse(self.top_logprobs and not self.logprobs, "top_logprobs needs logprobs=True")
        constraints = 3 - [self.grammar, self.json_schema, self.regex].count(None)
        refuse(constraints > 1, "grammar, json_schema and regex exclude each other")
        endless = self.ignore_eos or self.min_tokens
        refuse(constraints and endless, "ignore_eos or min_tokens with a grammar: a text that matches has to end")
        refuse(constraints and self.force_answer, "force_answer with a grammar: a text that matches has its own form")
        most = math.inf if self.thinking_budget is None else self.thinking_budget
        refuse(
            self.min_thinking > most,
            f"min_thinking must be a whole number up to thinking_budget, not {self.min_thinking!r}",
        )
        states = self.hidden_steps or self.hidden_prompt
        refuse(states and not self.hidden, "hidden_steps and hidden_prompt need hidden=True")

    @property
    def constrained(self) -> bool:
        """True if the text has to match a grammar, a schema or a regular expression."""
        return self.grammar is not None or self.json_schema is not None or self.regex is not None

    @property
    def limits_thoughts(self) -> bool:
        """True if thoughts have a budget or a least length."""
        return self.thinking_budget is not None or self.min_thinking > 0

    @property
    def forces(self) -> bool:
        """True if something may be forced upon the text."""
        return self.limits_thoughts or self.force_answer != ""

    @property
    def penalizes(self) -> bool:
        """True if any of the repetition penalties is on."""
        on = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return on and self.penalty_last_n > 0

    def resolved(self) -> SamplingParams:
        """Return the same with a seed."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(_SEEDS))

    def sample_seed(self, index: int) -> int:
        """Return the seed of sample ``index``; distinct for up to ``2**32 - 1`` samples."""
        if self.seed is None:
            raise TilebeamError("SamplingParams: no seed to derive from; call resolved() first.")
        return (self.seed + index) % _SEEDS


FIELDS = tuple(one.name for one in fields(SamplingParams))


class SamplingFields(TypedDict, total=False):
    """Fields of `SamplingParams` that a call takes by name, for type checkers and editors."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str] | None
    stop_tokens: Sequence[int]
    seed: int | None
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    statistics: bool
    grammar: str | None
    json_schema: Mapping[str, Any] | bool | str | HasSchema | None
    regex: str | None
    logit_bias: Mapping[int, float] | None
    speculate: bool
    hidden: bool
    hidden_steps: str
    hidden_prompt: bool
    shown_tokens: Sequence[int]
    thinking_budget: int | None
    budget_message: str
    min_thinking: int
    thinking_marks: Sequence[str] | None
    force_answer: str
    answer_tokens: int
    continues: int


class ModelSchema(dict[str, Any]):
    """The JSON schema of a class, and the class, which reads the texts that are valid under it."""

    model: Any = None

    @classmethod
    def of(cls, model: HasSchema) -> ModelSchema:
        """Make one of a class. (`dataclasses.asdict` makes copies of members alone.)"""
        schema = cls(model.model_json_schema())
        schema.model = model
        return schema


def parsed_under(schema: object, text: str, finish: str) -> Any:
    """Let the class whose schema it is read a text; None if there is no class, the text is not complete, or the class
    refuses it or has no `model_validate_json`."""
    if not isinstance(schema, ModelSchema) or finish != "stop":
        return None
    try:
        return schema.model.model_validate_json(text)
    except (AttributeError, ValueError):
        return None


def updated(
    sampling: SamplingParams | Sequence[SamplingParams] | None, changes: Mapping[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    """Return parameters with some fields changed: those given by name to `LM.generate` and the like.

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


def one_each(sampling: SamplingParams | Sequence[SamplingParams], prompts: int) -> list[SamplingParams]:
    """Return parameters for each of so many prompts.

    Raises:
        TilebeamError: there are more or fewer.
    """
    if isinstance(sampling, SamplingParams):
        return [sampling] * prompts
    if len(sampling) != prompts:
        raise TilebeamError(f"{prompts} prompts but {len(sampling)} SamplingParams.")
    return list(sampling)


def paired(
    prompts: Iterable[T], sampling: SamplingParams | Sequence[SamplingParams]
) -> Iterator[tuple[T, SamplingParams]]:
    """Return prompts, of which there may be any number, each with its parameters; see `one_each`."""
    if isinstance(sampling, SamplingParams):
        return zip(prompts, repeat(sampling))
    every = list(prompts)
    return zip(every, one_each(sampling, len(every)), strict=True)


def _is_schema(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return isinstance(value, Mapping | bool)


def _at_least(low: int, end: float = math.inf) -> Callable[[Any], bool]:
    """Accept whole numbers from `low` to below `end`."""
    return lambda value: is_integer(value) and low <= value < end


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(fits, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_grammar(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and "\0" not in value


_is_token = _at_least(0)

# Names of fields, what their values must pass, and how a sentence goes on that says so.
_OF_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", _at_least(1), "be a whole number of at least 1"),
    ("temperature", lambda value: is_finite(value) and value >= 0, "be >= 0"),
    ("top_k", _at_least(0, 2**31), "be a whole number, 0 for all"),
    ("top_p", lambda value: is_finite(value) and 0 < value <= 1, "be in (0, 1]"),
    ("min_p", lambda value: is_finite(value) and 0 <= value < 1, "be in [0, 1)"),
    ("repeat_penalty", lambda value: is_finite(value) and value > 0, "be > 0"),
    ("frequency_penalty presence_penalty", is_finite, "be a number"),
    ("penalty_last_n", _at_least(0, 2**31), "be a whole number, 0 for none"),
    ("max_tokens", _or_none(_at_least(1)), "be at least 1, or None"),
    ("min_tokens", _at_least(0), "be a whole number up to max_tokens"),
    ("stop", _all(_is_text), "hold strings that are not empty"),
    ("stop_tokens shown_tokens", _all(_is_token), "hold tokens"),
    ("seed", _or_none(_at_least(0)), "be >= 0 or None"),
    ("top_logprobs", _at_least(0), "be a whole number, 0 for none"),
    (
        "ignore_eos logprobs statistics speculate hidden hidden_prompt",
        lambda value: isinstance(value, bool),
        "be True or False",
    ),
    ("grammar", _or_none(_is_grammar), "be a GBNF text, or None"),
    ("regex", _or_none(_is_text), "be a regular expression, or None"),
    ("json_schema", _or_none(_is_schema), "be a JSON schema: a dict, JSON text or a pydantic model"),
    ("hidden_steps budget_message force_answer", lambda value: isinstance(value, str), "be a string"),
    ("thinking_budget", _or_none(_at_least(0)), "be a whole number of tokens, or None"),
    ("min_thinking answer_tokens continues", _at_least(0), "be a whole number of tokens"),
    (
        "thinking_marks",
        _or_none(lambda value: _all(_is_text)(value) and len(value) == 2 and all(map(str.strip, value))),
        "be two strings that are not blank, what opens thoughts and what closes them, or None",
    ),
    ("logit_bias", lambda value: isinstance(value, Mapping | None), "have a number for each of its tokens, as a dict"),
)
_RULES = tuple((name, fits, must) for names, fits, must in _OF_FIELDS for name in names.split())
