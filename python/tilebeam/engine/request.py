"""What the scheduler works on: a prompt with its samples, from the queue to their texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilebeam.engine.detokenizer import TextStream
from tilebeam.engine.kv_cache import Sequence
from tilebeam.engine.sampler import Sampler
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, FinishReason, Progress, RequestOutput, Usage
from tilebeam.sampling_params import SamplingParams


@dataclass(eq=False)
class Sample:
    """One sample on its way from the queue to its text."""

    request: Request
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    sampler: Sampler | None = None
    stream: TextStream | None = None
    kv: Sequence | None = None
    age: int = 0  # admission number: who gives way when cells run out
    finish: FinishReason | None = None
    limit: int = 0  # tokens that it may have
    reached: int = 0  # tokens, with the prompt, that had cells when it gave them up: decoded before
    shown: int = 0  # tokens whose text is in the stream

    @property
    def chain(self) -> Sampler:
        """The sampler of a sample that runs."""
        assert self.sampler is not None
        return self.sampler

    @property
    def streams(self) -> bool:
        """Whether its text is looked at while it grows, so that tokens must become text at once."""
        return bool(self.request.params.stop) or self.request.on_change is not None

    def target(self) -> list[int]:
        """The tokens that must be in the cache before the next token can be drawn."""
        return self.request.prompt_ids + self.tokens

    def todo(self) -> int:
        """Tokens still to decode before the next draw; 1 when it simply goes on."""
        held = len(self.kv) if self.kv else 0
        return len(self.request.prompt_ids) + len(self.tokens) - held


@dataclass(eq=False)
class Request:
    """One prompt with its samples.

    `on_change` is called by whoever steps the engine, with each sample that drew a token or ended; the request is
    complete when `unfinished` is 0.
    """

    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    progress: Progress  # of the call that the request belongs to
    on_change: Callable[[Sample], None] | None = None
    usage: Usage = field(default_factory=Usage)
    samples: list[Sample] = field(default_factory=list)
    lead: Sample | None = None  # decodes the prompt now
    followers: list[Sample] = field(default_factory=list)  # wait for the lead
    holder: Sequence | None = None  # keeps prompt[:-1] for samples still in the queue
    decoded: int = 0  # leading prompt tokens accounted for: decoded or taken from another prompt's cells
    waiting: int = 0  # samples in the queue
    unfinished: int = 0  # samples
    error: TilebeamError | None = None  # why it ended early, if it is this request's own fault

    @property
    def wants_norm(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self.params.logprobs or self.params.top_logprobs > 0

    def output(self) -> RequestOutput:
        """The result, complete once all samples are."""
        outputs = []
        for s in self.samples:
            logprobs = s.logprobs if self.params.logprobs else None
            outputs.append(
                CompletionOutput(
                    index=s.index,
                    text=s.stream.text if s.stream else "",
                    token_ids=s.tokens,
                    finish_reason=s.finish or "aborted",
                    seed=s.seed,
                    cumulative_logprob=sum(logprobs) if logprobs is not None else None,
                    logprobs=logprobs,
                    stop_reason=s.stream.stop_string if s.stream else None,
                    top_logprobs=s.top_logprobs if self.params.top_logprobs else None,
                )
            )
        return RequestOutput(self.prompt, self.prompt_ids, outputs, self.usage, self.seed)
