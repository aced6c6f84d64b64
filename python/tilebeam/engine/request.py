"""What the engine works on: a prompt with its samples, from the queue to their texts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from tilebeam.engine.detokenizer import Detokenizer
from tilebeam.engine.forcing import Forcer, Forcing
from tilebeam.engine.kv_cache import Sequence
from tilebeam.engine.matcher import is_known
from tilebeam.engine.sampler import NORM, SPREAD, TOKEN_ONLY, Sampler
from tilebeam.errors import TilebeamError
from tilebeam.grammars.constraint import grammar_of
from tilebeam.native.llama import Context, Vocab, check_tokens
from tilebeam.outputs import CompletionOutput, FinishReason, Progress, RequestOutput, Usage
from tilebeam.sampling_params import SamplingParams, parsed_under
from tilebeam.text_state import TextState


@dataclass(eq=False)
class Sample:
    """One sample on its way from the queue to its text."""

    request: Request
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    certainties: list[float] = field(default_factory=list)
    sampler: Sampler | None = None
    forcer: Forcer | None = None  # where tokens may be forced
    detokenizer: Detokenizer | None = None
    kv: Sequence | None = None
    age: int = 0  # admission number: who is preempted when cells run out
    finish: FinishReason | None = None
    limit: int = 0  # tokens that it may have
    reached: int = 0  # tokens, with the prompt, that had cells when it was preempted: decoded before
    detokenized: int = 0  # tokens whose text is in the detokenizer
    place: int | None = None  # of its hidden states, while it wants any
    hidden: TextState | None = None  # at its end
    hidden_steps: list[TextState] = field(default_factory=list)
    tail: bytes = b""  # of its text: what may be the beginning of a step's end

    @property
    def detokenizes(self) -> bool:
        """Return whether its text is looked at while it grows, so that tokens must become text at once."""
        params = self.request.params
        return bool(params.stop or params.stop_tokens) or self.request.on_change is not None

    def ends_with(self, token: int, vocab: Vocab) -> bool:
        """Return whether a token ends it, one of the model's or of those that were asked for."""
        params = self.request.params
        return token in params.stop_tokens or (vocab.is_end(token) and not params.ignore_eos)

    def output(self) -> CompletionOutput:
        """Return what came of it, complete once it has ended, without its hidden states."""
        params = self.request.params
        logprobs = self.logprobs if params.logprobs else None
        text, finish = self.detokenizer.text if self.detokenizer else "", self.finish or "aborted"
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.tokens,
            finish_reason=finish,
            seed=self.seed,
            cumulative_logprob=sum(logprobs) if logprobs is not None else None,
            logprobs=logprobs,
            stop_reason=self.detokenizer.stop_string if self.detokenizer else None,
            top_logprobs=self.top_logprobs if params.top_logprobs else None,
            entropies=self.entropies if params.statistics else None,
            certainties=self.certainties if params.statistics else None,
            parsed=parsed_under(self.request.schema, text, finish),
        )

    def target(self) -> list[int]:
        """Return the tokens that must be in the cache before the next token can be drawn."""
        return self.request.prompt_ids + self.tokens

    def draws_alone(self) -> bool:
        """Return whether the hidden state of its last token is wanted, so that no batch with prompts may decode that
        token."""
        return self.request.params.hidden and (bool(self.tokens) or self.request.params.hidden_prompt)

    def todo(self) -> int:
        """Return tokens still to decode before the next draw; 1 when it simply goes on."""
        held = len(self.kv) if self.kv else 0
        return len(self.request.prompt_ids) + len(self.tokens) - held


@dataclass(eq=False)
class Request:
    """One prompt with its samples.

    `on_change` is called in the thread that steps the engine, with each sample that drew a token or ended; the request
    is complete when `unfinished` is 0.
    """

    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    progress: Progress  # of the call that the request belongs to
    on_change: Callable[[Sample], None] | None = None
    usage: Usage = field(default_factory=Usage)
    samples: list[Sample] = field(default_factory=list)
    prefiller: Sample | None = None  # the sample that decodes the prompt now
    forks: list[Sample] = field(default_factory=list)  # admitted; fork from the prefiller when the prompt is decoded
    pinned: Sequence | None = None  # keeps prompt[:-1] in the cache for samples still queued
    decoded: int = 0  # leading prompt tokens accounted for: decoded or taken from another prompt's cells
    queued: int = 0  # samples
    unfinished: int = 0  # samples
    error: TilebeamError | None = None  # why it ended early, if it is this request's own fault
    schema: object = None  # that the grammar was made of
    forcing: Forcing | None = None

    @property
    def text_start(self) -> int:
        """The position of the first token whose hidden state counts."""
        return len(self.prompt_ids) - self.params.hidden_prompt

    @property
    def wants(self) -> int:
        """Return what a draw has to tell besides the token; see `SampleRows`."""
        if self.params.statistics:
            return SPREAD
        return NORM if self.params.logprobs or self.params.hidden else TOKEN_ONLY

    def output(self) -> RequestOutput:
        """Return the result, complete once all samples are."""
        outputs = [
            replace(s.output(), hidden=s.hidden, hidden_steps=s.hidden_steps if self.params.hidden_steps else None)
            for s in self.samples
        ]
        return RequestOutput(self.prompt, self.prompt_ids, outputs, self.usage, self.seed)


def check_prompt(prompt_ids: SequenceOf[int], context: Context) -> None:
    """Raise `TilebeamError` if a context cannot run this prompt."""
    if not prompt_ids:
        raise TilebeamError("The prompt has no tokens.")
    if len(prompt_ids) >= context.n_ctx:
        raise TilebeamError(
            f"The prompt has {len(prompt_ids)} tokens, the context {context.n_ctx}: at least one must stay free; "
            "shorten the prompt or load the model with a larger n_ctx."
        )
    check_tokens(prompt_ids, context.model.vocab.size)


def make_request(
    context: Context, prompt: str, prompt_ids: list[int], params: SamplingParams, progress: Progress
) -> Request:
    """Check a prompt and its parameters, and make samples of them; any thread may.

    Args:
        progress: of the call that the request belongs to; its total grows by the samples.

    Raises:
        TilebeamError: the request cannot be run.
    """
    check_prompt(prompt_ids, context)
    if not context.model.vocab.has_text and (params.constrained or params.stop or params.forces):
        raise TilebeamError(
            "This model has no tokenizer, so that its tokens are no text: no grammar, no stop strings, no budget of "
            "thoughts and no forced answer."
        )
    if params.continues > len(prompt_ids):
        raise TilebeamError(f"continues: the prompt has {len(prompt_ids)} tokens, fewer than {params.continues}.")
    size = context.model.vocab.size
    for name, tokens in (("stop_tokens", params.stop_tokens), ("logit_bias", params.logit_bias or ())):
        if (last := max(tokens, default=0)) >= size:
            raise TilebeamError(f"{name}: token {last} is not in the vocabulary (0 to {size - 1}).")
    schema = params.json_schema
    params = _with_checked_grammar(params, context.model.vocab).resolved()
    request = Request(prompt, prompt_ids, params, params.seed or 0, progress, unfinished=params.n, schema=schema)
    request.usage.prompt_tokens = len(prompt_ids)
    request.samples = [Sample(request, i, params.sample_seed(i)) for i in range(params.n)]
    progress.total += params.n
    return request


def _with_checked_grammar(params: SamplingParams, vocab: Vocab) -> SamplingParams:
    """Constrain the parameters by one grammar or none. A grammar that was fine is not looked at again: the check takes
    long where it is large, and many prompts have the same one.

    Raises:
        TilebeamError: there is no such grammar.
    """
    known = params.grammar is not None and is_known(params.grammar, vocab)
    if params.constrained and not known:
        params = replace(params, grammar=grammar_of(params), json_schema=None, regex=None)
        known = params.grammar is not None and is_known(params.grammar, vocab)
    if params.constrained and not known:
        Sampler(params, 0, vocab).close()
    return params
