"""Results of generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tilebeam.errors import SearchCancelled

if TYPE_CHECKING:
    from tilebeam.text_state import TextState

FinishReason = Literal["stop", "length", "aborted", "tool_calls"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that a model wrote in a chat.

    Attributes:
        id: of the call; a message with its result names it.
        name: of the function.
        arguments: a JSON text, an object's unless the answer was cut.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """Describe it as OpenAI's API does."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The beginning of a call of a function, or more of its arguments.

    Attributes:
        call: its number among the answer's calls.
        arguments: what its arguments grow by.
        name: the function, where the call begins; else None.
        id: of the call, where it begins; else None.
    """

    call: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


@dataclass
class Usage:
    """Tokens and seconds.

    Tokens are exact. Seconds are shares: a batch serves many sequences, its time is split over its tokens.

    Attributes:
        prompt_tokens: tokens of the prompt, counted once however many samples share them.
        cached_tokens: of these, taken from another prompt's KV cells instead of being decoded.
        completion_tokens: tokens sampled, end-of-generation tokens included.
        recomputed_tokens: tokens decoded a second time: the last prompt token of samples that started after the
            prompt's own batch, and whole sequences that had to give up their cells for a while.
        drafted_tokens: tokens that were guessed and decoded before they were drawn.
        accepted_tokens: of these, those that were then drawn. The others were decoded in vain.
        scored_tokens: tokens decoded by a reward model (searches only).
        full_scoring_tokens: what it would have decoded had it kept no cells: the whole text of every solution, each
            time one is rated.
        prefill_seconds, decode_seconds: inside llama_decode, on prompt and on sampled tokens.
        drafting_seconds: guessing tokens ahead, a draft model's decoding included.
        sampling_seconds: drawing tokens and turning them into text.
        scoring_seconds: inside a scorer (searches only).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    scored_tokens: int = 0
    full_scoring_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafting_seconds: float = 0.0
    sampling_seconds: float = 0.0
    scoring_seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def seconds(self) -> float:
        """All shares added up."""
        generating = self.prefill_seconds + self.decode_seconds + self.drafting_seconds + self.sampling_seconds
        return generating + self.scoring_seconds

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass
class CompletionOutput:
    """One sample.

    Attributes:
        index: its number among the prompt's samples.
        text: what was generated, cut before a stop string. Bytes that are no UTF-8 show as U+FFFD.
        token_ids: all sampled tokens, also those behind the cut and a closing end-of-generation token.
        finish_reason: "stop" (end of generation or a stop string), "length" (max_tokens, or the context is full),
            "aborted" (cancelled), or "tool_calls" (a chat's answer that calls functions, complete).
        seed: what its tokens were drawn with.
        stop_reason: the stop string that ended it, None if something else did.
        cumulative_logprob: sum of ``logprobs``; None unless asked for.
        logprobs: natural log-probability of each token under the model; None unless asked for.
        top_logprobs: for each token the likeliest tokens at its position and their natural log-probabilities,
            likeliest first; None unless asked for.
        entropies: of each token's distribution p over the vocabulary, as the model computed it, the sum of -p log p in
            nats; None unless asked for.
        certainties: of the same the mean of -log(V p) over the V tokens of the vocabulary, the divergence of the
            uniform distribution from it: 0 where all are alike, more where the model is sure (Kang et al., arXiv
            2502.18581); None unless asked for.
        hidden: what its tokens' hidden states add up to; None unless asked for.
        hidden_steps: the same where each step ended; None unless asked for.
        reasoning: of a chat's answer what the model thought, which `text` does not hold; None: nothing.
        tool_calls: of a chat's answer the calls of functions, which `text` does not hold either.
        written: of a chat's answer all that the model wrote, with its thoughts and calls; None: `text` is all.
        parsed: what ``json_schema=Class`` made of the text; None if that is incomplete, or no class was given.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    cumulative_logprob: float | None = None
    logprobs: list[float] | None = None
    stop_reason: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    entropies: list[float] | None = field(default=None, repr=False)
    certainties: list[float] | None = field(default=None, repr=False)
    hidden: TextState | None = field(default=None, repr=False, compare=False)
    hidden_steps: list[TextState] | None = field(default=None, repr=False, compare=False)
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    written: str | None = field(default=None, repr=False, compare=False)
    parsed: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        calls = f", tool_calls={len(self.tool_calls)}" if self.tool_calls else ""
        tokens = f", {len(self.token_ids)} tokens" if self.token_ids else ""  # a server tells none
        return f"<sample {self.index}: {short(self.text)}{tokens}, {self.finish_reason}{calls}>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: all but hidden states and `parsed`; thoughts, calls and statistics where there are
        any."""
        others = ("hidden", "hidden_steps", "tool_calls", "written", "parsed")
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in others}
        for name in ("entropies", "certainties", "reasoning"):
            if told[name] is None:
                del told[name]
        return told | ({"tool_calls": [c.as_dict() for c in self.tool_calls]} if self.tool_calls else {})

    @property
    def message(self) -> dict[str, Any]:
        """Return a chat's answer as the message of the assistant, which the next turn's messages hold."""
        told: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            told["reasoning_content"] = self.reasoning
        if self.tool_calls:
            told["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return told


@dataclass(frozen=True)
class Delta:
    """New text and tokens of one sample of a stream.

    Attributes:
        index: the sample's number.
        text: new text, as far as no stop string can still cut it; "" while only part of a character is known.
        token_ids: new tokens.
        logprobs: of these tokens; None unless asked for.
        finish_reason: why the sample ended, None while it goes on. Exactly one delta of each sample has it, its last.
        stop_reason: the stop string that ended it.
        top_logprobs: see `CompletionOutput`, for the new tokens.
        reasoning: in a chat, what the thoughts grew by, which are no part of the text.
        tool_calls: in a chat, what calls of functions grew by.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


@dataclass
class RequestOutput:
    """One prompt and its samples, in the order of their index.

    Attributes:
        prompt, prompt_token_ids: what the model read.
        outputs: the samples.
        usage: tokens and seconds of all of them.
        seed: of the first sample.
    """

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    seed: int

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.outputs[0].text

    def __repr__(self) -> str:
        more = f" and {len(self.outputs) - 1} more" if len(self.outputs) > 1 else ""
        first = repr(self.outputs[0]) if self.outputs else "nothing"
        return f"<answer to {short(self.prompt)}: {first}{more}>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: all but hidden states."""
        return asdict(replace(self, outputs=[])) | {"outputs": [c.as_dict() for c in self.outputs]}


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation after its prompt; see `LM.loglikelihood` for which tokens count as its own.

    Attributes:
        token_ids: the tokens that were scored.
        logprobs: natural log-probability of each, given all tokens before it.
        greedy: whether each of them is the likeliest one at its place.
        characters, bytes: length of the continuation's text (bytes in UTF-8); tokens that stand for no text have none.
        decoded_tokens: tokens that went through the model for this continuation. What it shares with another one of
            the same call is counted for one of them.
        cached_tokens: tokens that were in the KV cache.
        seconds: inside llama_decode, this continuation's share.
    """

    token_ids: list[int]
    logprobs: list[float]
    greedy: bool
    characters: int
    bytes: int
    decoded_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def logprob(self) -> float:
        """The sum over all tokens."""
        return math.fsum(self.logprobs)

    @property
    def per_token(self) -> float:
        """The mean over the tokens."""
        return self.logprob / len(self.logprobs)

    @property
    def per_character(self) -> float:
        """The sum divided by the characters, -inf for a text without any."""
        return self.logprob / self.characters if self.characters else -math.inf

    @property
    def per_byte(self) -> float:
        """The sum divided by the bytes, -inf for a text without any."""
        return self.logprob / self.bytes if self.bytes else -math.inf


def short(text: str) -> str:
    """Quote the beginning of a text, on one line."""
    line = " ".join(text[:240].split())
    return repr(line if len(line) <= 60 and len(text) <= 240 else line[:57] + "...")


def check_complete(outputs: Sequence[RequestOutput]) -> None:
    """Raise `SearchCancelled` if a sample was aborted."""
    if any(c.finish_reason == "aborted" for o in outputs for c in o.outputs):
        raise SearchCancelled("The search was cancelled.")


@dataclass(frozen=True)
class EngineFigures:
    """The present load of a model's engine, for those who watch it.

    Attributes:
        running: samples that hold a slot.
        waiting: samples that wait for one.
        slots: samples that can decode at the same time.
        cells, cells_used: of the KV cache, one per token; cells that several samples share count once.
        batches: how many batches drew a token for that many samples, since the model was loaded.
    """

    running: int
    waiting: int
    slots: int
    cells: int
    cells_used: int
    batches: dict[int, int]


@dataclass
class Progress:
    """Handed to a progress hook after every batch: how far its call is, whoever shares the batches.

    Attributes:
        finished, total: samples.
        running: samples that hold a slot now.
        tokens: sampled so far.
        prompt_tokens: of prompts decoded so far.
        seconds: since the call began.
    """

    finished: int = 0
    total: int = 0
    running: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0


# Called after every batch; returning False cancels what is not finished.
ProgressHook = Callable[[Progress], "bool | None"]
# Called with the number of a prompt and each of its samples that has ended, without its hidden states; returns the
# numbers of prompts whose other samples nobody wants any more: they end as "aborted". None: of no prompt.
SampleHook = Callable[[int, CompletionOutput], "Iterable[int] | None"]
