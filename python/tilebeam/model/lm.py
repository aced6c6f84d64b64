"""A loaded model: text in, samples out. What `tilebeam.load` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np
import numpy.typing as npt

from tilebeam.engine.dispatcher import Call, Dispatcher
from tilebeam.engine.draft_model import DraftModel
from tilebeam.engine.engine import Engine
from tilebeam.engine.likelihood import Continued, LikelihoodPlan, continued_ids, continued_text
from tilebeam.engine.observer import Observer
from tilebeam.engine.reading import Reader, ReadHook, Reading
from tilebeam.engine.request import check_prompt, make_request
from tilebeam.engine.speculation import FEW_SAMPLES, Speculation
from tilebeam.engine.streams import AsyncStream, Stream, run, run_async
from tilebeam.errors import TilebeamError
from tilebeam.gguf import MatrixGroup, device_share
from tilebeam.native.chat_template import ChatTemplates
from tilebeam.native.llama import Context, Model, errors_in, log_router
from tilebeam.outputs import Figures, Likelihood, Progress, ProgressHook, RequestOutput
from tilebeam.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class LoadInfo:
    """How a model was loaded.

    Attributes:
        path: the file.
        device: "npu" or "cpu".
        repacked: whether the file holds tiles.
        tiled_tensors: tensors that the device holds as tiles.
        n_ctx, n_batch, n_ubatch, n_seq_max, threads: as in force.
        executor: "thread" or "process", None on the CPU.
        layers: layers on each device, HMX0 first; the output counts as a layer. Empty on the CPU.
        divided: matrices that are cut over several devices.
        lora: LoRA adapters in force: files and scales.
        matrices: the weight matrices by type and place, the most bytes first.
    """

    path: str
    device: str
    repacked: bool
    tiled_tensors: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    threads: int
    executor: str | None
    layers: tuple[int, ...] = ()
    divided: tuple[str, ...] = ()
    lora: tuple[tuple[str, float], ...] = ()
    matrices: tuple[MatrixGroup, ...] = ()

    @property
    def device_share(self) -> float:
        """The part of the weight matrices' bytes that the device multiplies by: 1 for all, 0 on the CPU."""
        return device_share(self.matrices)


class LM:
    """A model with one context, ready to decode many sequences at a time.

    Use it as a context manager or call `close`. Calls of `generate` from several threads, and their streaming and
    asynchronous forms, share batches. `read`, `logits` and `raw_decode` need the context for themselves: they wait
    until what was asked for before has ended, and what is asked for later waits for them. In a child of fork() every
    call raises `TilebeamError`: load the model there.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        info: LoadInfo,
        on_failure: Callable[[int, str], TilebeamError],
        resources: ExitStack,
    ) -> None:
        self.info = info
        self._model = model
        self._context = context
        self._resources = resources
        self._failure = on_failure
        self._engine = Engine(context, info.n_seq_max, context.n_seq_max, self._failed)
        self._reader = Reader(context, self._engine.kv, self._engine.fail)
        self._dispatcher = Dispatcher(self._engine)
        self._templates = ChatTemplates(model.vocab, model.chat_template())
        self._lock = threading.Lock()  # of what is counted below
        self._kept_for = 0  # keep_prefixes() in force

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
    ) -> list[RequestOutput]:
        """Generate samples for one or several prompts.

        Args:
            prompts: texts, or lists of token ids (taken as they are, without a BOS token being added).
            sampling: for all prompts, or one per prompt.
            progress: called after every batch; returning False cancels what is not finished.

        Returns:
            One result per prompt, in their order.

        Raises:
            TilebeamError: a prompt is empty or longer than the context, or the grammar is none (before anything is
                decoded); decoding failed; or the model was closed meanwhile. NpuError: the NPU failed; the model must
                be loaded again.
        """
        call = Call(watched=progress is not None)
        self._fill(call, prompts, sampling)
        return run(self._dispatcher, call, progress)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
    ) -> list[RequestOutput]:
        """`generate` for coroutines: the event loop goes on meanwhile. Calls of different tasks share batches.

        Cancelling the task aborts the call and frees its KV cells. `progress` is called in the event loop's thread;
        after several batches at once, if it was busy.
        """
        call = Call(watched=progress is not None)
        self._fill(call, prompts, sampling)
        return await run_async(self, self._dispatcher, call, progress)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Stream:
        """Generate samples for one prompt and get them as they grow.

        Args:
            prompt: a text, or a list of token ids.
            sampling: as for `generate`. With n above 1 the deltas of all samples come, each with its index.

        Returns:
            An iterator of `Delta`; the texts of a sample's deltas make up its text. Also a context manager.

        Raises:
            TilebeamError: as `generate`; what goes wrong while decoding is raised by the iterator.
        """
        call = Call(streams=True, watched=True)
        self._fill(call, [prompt], sampling)
        self._dispatcher.submit(call)
        return Stream(self, self._dispatcher, call)

    def astream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> AsyncStream:
        """`stream` for coroutines: to be called in one, an async iterator and context manager. The samples grow at
        once, whether it is read or not."""
        call = Call(streams=True, watched=True)
        self._fill(call, [prompt], sampling)
        stream = AsyncStream(self, self._dispatcher, call)
        self._dispatcher.submit(call, background=self)
        return stream

    def _fill(
        self,
        call: Call,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> None:
        """Make requests of prompts, all of them checked before any is submitted."""
        items = _as_list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            params = [sampling or SamplingParams()] * len(items)
        else:
            params = list(sampling)
            if len(params) != len(items):
                raise TilebeamError(f"{len(items)} prompts but {len(params)} SamplingParams.")
        with self._dispatcher.using():
            vocab = self._model.vocab
            for prompt, p in zip(items, params, strict=True):
                if isinstance(prompt, str):
                    text, ids = prompt, vocab.tokenize(prompt, True, True)
                else:
                    ids = [int(t) for t in prompt]
                    check_prompt(ids, self._context)
                    text = vocab.text(ids)
                call.add(make_request(self._context, text, ids, p, call.progress))

    def logits(self, tokens: Sequence[int], *, chunk: int | None = None) -> npt.NDArray[np.float32]:
        """Logits at every position of one sequence.

        Args:
            tokens: token ids, at most n_ctx.
            chunk: tokens per batch; None: as many as fit. 1 decodes token by token.

        Returns:
            float32 [len(tokens), n_vocab]; row i is the prediction for token i + 1.
        """
        ids = [int(t) for t in tokens]
        with self.raw_decode() as context:
            if not ids or len(ids) > self._context.n_ctx:
                raise TilebeamError(f"logits() takes 1 to {self._context.n_ctx} tokens, not {len(ids)}.")
            if min(ids) < 0 or max(ids) >= self.n_vocab:
                raise TilebeamError(f"Tokens must be between 0 and {self.n_vocab - 1}.")
            result = np.empty((len(ids), self.n_vocab), np.float32)
            step = min(chunk or context.max_outputs, context.max_outputs)
            if step < 1:
                raise TilebeamError(f"chunk must be at least 1, not {chunk}.")
            for start in range(0, len(ids), step):
                part = ids[start : start + step]
                n = len(part)
                context.token[:n] = part
                context.pos[:n] = np.arange(start, start + n)
                context.seq[:n] = 0
                context.output[:n] = 1
                self.check_decode(context.decode(n))
                for i in range(n):
                    result[start + i] = context.logits(i)
            return result

    @contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        """While this lasts, the KV cells of finished samples stay, as long as there is room: a prompt that begins with
        one of them (its tokens and those of its text) forks it, and only what is new is decoded. Reentrant.

        Results then depend, in the last bits of the logits, on what was kept before; the same calls in the same order
        give the same texts, where no tokens are guessed ahead.
        """
        with self._dispatcher.using():
            self._keep(1)
        try:
            yield
        finally:
            self._keep(-1)

    def _keep(self, change: int) -> None:
        with self._lock:
            before, self._kept_for = self._kept_for, self._kept_for + change
            if (before == 0 or self._kept_for == 0) and not self._dispatcher.closed and not self._engine.broken:
                self._dispatcher.set_caching(self._kept_for > 0)

    def read(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[Sequence[int]],
        tokens: Sequence[int] | None = None,
        *,
        progress: ReadHook | None = None,
    ) -> list[Reading]:
        """What the model expects after given positions of texts, without generating; see `keep_prefixes`.

        Args:
            prompts: texts, or lists of token ids.
            positions: for each prompt, indices into its tokens (negative ones count from the end), in any order.
            tokens: whose logits are wanted; None: of the whole vocabulary.
            progress: called after every batch with (tokens decoded, tokens to decode).

        Returns:
            One `Reading` per prompt: float32 logits [positions, tokens], and what it cost.

        Raises:
            TilebeamError: a prompt is empty or longer than the context, a position lies outside, or decoding failed.
        """
        ids = [self.tokenize(p) if isinstance(p, str) else [int(t) for t in p] for p in prompts]
        with self._dispatcher.exclusive():
            return self._reader.logits(ids, positions, tokens, progress)

    def hidden(
        self, prompts: Sequence[Prompt], positions: Sequence[Sequence[int]], *, progress: ReadHook | None = None
    ) -> list[Reading]:
        """Hidden states behind the final norm at given positions of texts: what a value head or classifier reads.

        As `read`, with `Reading.hidden` instead of logits: float32 [positions, n_embd].
        """
        ids = [self.tokenize(p) if isinstance(p, str) else [int(t) for t in p] for p in prompts]
        with self._dispatcher.exclusive():
            return self._reader.hidden(ids, positions, progress)

    def loglikelihood(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        parse_special: bool = True,
        progress: ReadHook | None = None,
    ) -> list[Likelihood]:
        """How likely each of several continuations of a prompt is; see `loglikelihoods`.

        lm.loglikelihood("The capital of France is", [" Paris", " Lyon"])[0].logprob
        """
        return self.loglikelihoods([(prompt, continuations)], parse_special=parse_special, progress=progress)[0]

    def loglikelihoods(
        self,
        prompts: Sequence[tuple[Prompt, Sequence[Prompt]]],
        *,
        parse_special: bool = True,
        progress: ReadHook | None = None,
    ) -> list[list[Likelihood]]:
        """How likely continuations of prompts are, without generating. Sequences share batches, and what texts have in
        common is decoded once; see `keep_prefixes`.

        Texts: prompt and continuation are tokenized as one text, put together as they are (a space between them must
        be in one of them). Scored are its tokens from the first one that the prompt alone, without white space at its
        end, does not have: a token over the border belongs to the continuation. All continuations of one prompt are
        scored from the same token on, so that sums can be compared. In front of an empty prompt stands BOS, or EOS in
        models without.

        Token ids: taken as they are, without a BOS token being added; every token of the continuation is scored.

        Args:
            prompts: pairs of a prompt and its continuations; all texts or all token ids.
            parse_special: read control tokens spelled out in texts as such. Turn it off for untrusted text.
            progress: called after every batch with (tokens decoded, tokens to decode).

        Returns:
            For each prompt a `Likelihood` per continuation.

        Raises:
            TilebeamError: prompt and continuation do not fit the context, a continuation is empty, or decoding failed.
        """
        plan = LikelihoodPlan([self._continued(*pair, parse_special) for pair in prompts], self._context.n_ctx)
        with self._dispatcher.exclusive():
            return plan.results(self._reader.logprobs(plan.targets, plan.positions, plan.tokens, progress))

    def _continued(self, prompt: Prompt, continuations: Sequence[Prompt], parse_special: bool) -> Continued:
        if isinstance(continuations, str):
            raise TilebeamError("Continuations are a list of texts, or of token ids, not one text.")
        with self._dispatcher.using():
            vocab = self._model.vocab
            texts = [c for c in continuations if isinstance(c, str)]
            if isinstance(prompt, str) and len(texts) == len(continuations):
                return continued_text(vocab, prompt, texts, parse_special)
            if isinstance(prompt, str) or texts:
                raise TilebeamError("Prompt and continuations must be all texts, or all token ids.")
            return continued_ids(vocab, prompt, cast(Sequence[Sequence[int]], continuations))

    @contextmanager
    def raw_decode(self) -> Iterator[Context]:
        """The context for direct use of its batch arrays, with an empty cache before and after (for measurements).

        What `keep_prefixes` kept is forgotten. In this block this thread can neither generate nor close the model.
        """
        with self._dispatcher.exclusive():
            self._engine.abort()
            try:
                yield self._context
            finally:
                self._engine.abort()

    def check_decode(self, code: int) -> None:
        """Raise what a return code of llama_decode stands for; afterwards the model can only be closed."""
        if code != 0:
            self._engine.fail(code)

    def speculate(self, lookup: bool | None = None, draft: LM | None = None) -> None:
        """Guess tokens ahead from now on, by look-up, by a draft model, or by both; by neither: stop guessing.

        Args:
            lookup: guess from the prompt, the other samples and earlier texts. None: without a draft model, in steps
                of few samples (at most `FEW_SAMPLES`), if this model's memory can go back to an earlier token.
            draft: a model that nothing else uses; it is closed with this one.

        Raises:
            TilebeamError: this model's memory cannot go back to an earlier token, or the draft model does not fit it;
                the draft model is closed then.
        """
        with self._dispatcher.exclusive(), ExitStack() as stack:
            if draft is not None:
                stack.callback(draft.close)
            reason = self._engine.drafting_off
            if reason and (lookup or draft is not None):
                raise TilebeamError(f"{self.info.path} cannot speculate: {reason}.")
            model = None if draft is None else DraftModel(draft._context, self._context)
            if model is not None:
                stack.callback(model.close)
            drafter = None
            if lookup or model is not None:
                drafter = Speculation(bool(lookup), model)
            elif lookup is None and not reason:
                drafter = Speculation(most_samples=FEW_SAMPLES)
            self._engine.use_drafter(drafter)
            self._resources.push(stack.pop_all())

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of all phases of the engine's work from now on; None: of none any more. A model has one
        observer at a time."""
        self._engine.observe(observer)

    # --- text -------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            add_special: add the BOS (and EOS) token where the model asks for it.
            parse_special: read control tokens spelled out in the text as such. Turn it off for untrusted text.
        """
        with self._dispatcher.using():
            return self._model.vocab.tokenize(text, add_special, parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids; control tokens are left out."""
        with self._dispatcher.using():
            return self._model.vocab.text([int(t) for t in tokens])

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text, which need not be whole characters; of control tokens none."""
        with self._dispatcher.using():
            return self._model.vocab.piece(token)

    def spelling(self, token: int) -> bytes:
        """The bytes that stand for a token in a template or a dump: those of its text, of a control token its name."""
        with self._dispatcher.using():
            vocab = self._model.vocab
            return vocab.spelling(token).encode() if vocab.is_control(token) else vocab.piece(token)

    def is_control(self, token: int) -> bool:
        """Whether a token is no text: BOS, the marks of chat templates .."""
        with self._dispatcher.using():
            return self._model.vocab.is_control(token)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_assistant: bool = True, template: str | None = None
    ) -> str:
        """A prompt from messages like {"role": "user", "content": "..."}.

        Args:
            messages: the turns.
            add_assistant: end where the assistant speaks.
            template: a Jinja template, or the name of one of llama.cpp's ("chatml"); None: the model's own.

        Raises:
            TilebeamError: the model has no template (a base model), the template cannot be run, or it does not take
                these messages.
        """
        with self._dispatcher.using():
            return self._templates.apply(messages, add_assistant, template)

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raise `TilebeamError` if `generate` would refuse these before decoding anything. Any thread may ask."""
        with self._dispatcher.using():
            make_request(self._context, "", list(prompt), sampling, Progress())

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> TilebeamError | None:
        """Why decoding failed for good, so that the model can only be closed; None: it did not."""
        return self._engine.broken

    def figures(self) -> Figures:
        """What the model is doing now. Never waits."""
        return self._engine.figures()

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._model.vocab.size

    @property
    def n_embd(self) -> int:
        """Elements of a hidden state."""
        return self._model.n_embd

    @property
    def n_layer(self) -> int:
        """Layers."""
        return self._model.n_layer

    @property
    def n_ctx(self) -> int:
        """KV cells, shared by all sequences."""
        return self._context.n_ctx

    @property
    def n_seq_max(self) -> int:
        """Samples that decode at the same time."""
        return self.info.n_seq_max

    @property
    def device(self) -> str:
        """ "npu" or "cpu"."""
        return self.info.device

    @property
    def eos(self) -> int:
        """The end-of-text token, -1 if the model has none."""
        return self._model.vocab.eos

    @property
    def bos(self) -> int:
        """The begin-of-text token, -1 if the model has none."""
        return self._model.vocab.bos

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants its texts to begin with `bos`."""
        return self._model.vocab.adds_bos

    @property
    def max_outputs(self) -> int:
        """Most positions of one batch that may have logits."""
        return self._context.max_outputs

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as text."""
        with self._dispatcher.using():
            return self._model.metadata()

    @property
    def description(self) -> str:
        """llama.cpp's one-line description of the model."""
        with self._dispatcher.using():
            return self._model.description()

    @property
    def n_params(self) -> int:
        """Parameters of the model."""
        return self._model.n_params

    @property
    def n_bytes(self) -> int:
        """Bytes of its weights."""
        return self._model.n_bytes

    # --- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and all it holds. Calls that are under way in other threads or tasks end with an exception.
        Idempotent."""
        if self._dispatcher.close():
            with log_router().capture():
                self._engine.abort()
                self._resources.close()

    def __enter__(self) -> LM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        dispatcher = getattr(self, "_dispatcher", None)
        if dispatcher is not None and not dispatcher.closed:
            self.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._dispatcher.closed
            else f"device={self.device!r}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max}"
        )
        return f"<tilebeam.LM {self.info.path!r} {state}>"

    def _failed(self, code: int) -> TilebeamError:
        return self._failure(code, errors_in(self._dispatcher.log))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [cast(Sequence[int], items)]
    return cast(list[Prompt], items)
