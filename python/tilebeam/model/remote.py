"""A server as the model: searches over any OpenAI-compatible server, such as vLLM, llama-server or Tilebeam's own.

    lm = tilebeam.connect("http://127.0.0.1:8000/v1", model="qwen")
    tilebeam.SelfConsistency("last-number").infer(lm, "Natalia sold ...", budget=16)

A server gives texts and log-probabilities: best-of-n, votes, adaptive votes and judges that write numbers work. What
reads tokens, logits or hidden states (searches by steps, reward heads) needs `tilebeam.load`, and says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

from tilebeam.chat.chat_prompt import filled_text
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install
from tilebeam.outputs import CompletionOutput, FinishReason, Progress, ProgressHook, RequestOutput, SampleHook, Usage
from tilebeam.prompt import Messages, Prompt, is_messages, is_one
from tilebeam.sampling_params import FIELDS, SamplingFields, SamplingParams, parsed_under, updated

AT_ONCE = 16  # requests under way
# Fields that every server takes.
_COMMON = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "max_tokens")
# Fields that OpenAI's own API lacks, and others have: sent where they are not the default.
_MORE = ("top_k", "min_p", "repeat_penalty", "min_tokens", "ignore_eos", "grammar")
_SENT = {*_COMMON, *_MORE, "n", "stop", "seed", "logprobs", "top_logprobs", "json_schema", "speculate"}


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Conversation(Prompt):
    """A prompt whose messages the server puts into its template."""

    messages: tuple[Any, ...] = field(default=(), hash=False)


class _NotHereError(TilebeamError, AttributeError):
    """Something is asked of a server that only a model in this process has."""


class RemoteLM:
    """A model behind a server; see `connect`. May be used from many threads.

    Attributes:
        url, model: where it is, and its name there.
    """

    def __init__(self, client: Any, model: str, at_once: int) -> None:
        self.url, self.model = str(client.base_url), model
        self._client, self._at_once = client, at_once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tilebeam.RemoteLM {self.model!r} at {self.url}>"

    if not TYPE_CHECKING:  # type checkers refuse what is not here

        def __getattr__(self, name: str) -> Any:
            raise _NotHereError(
                f"{name} needs the model in this process, as tilebeam.load gives it; a server gives texts only."
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def keep_prefixes(self) -> AbstractContextManager[None]:
        """Do nothing: a server keeps the prefixes that it wants to."""
        return nullcontext()

    def chat_prompt(self, messages: Messages) -> Prompt:
        """Make the prompt of a conversation; the server has the template. Its question is what the user said last."""
        if not is_messages(messages):
            raise TilebeamError('A conversation is a list of messages, like {"role": "user", "content": ".."}.')
        said = [str(turn.get("content") or "") for turn in messages]
        asked = [text for turn, text in zip(messages, said, strict=True) if turn.get("role") == "user"]
        return _Conversation("\n\n".join(said), question=asked[-1] if asked else None, messages=tuple(messages))

    def filled_prompt(self, template: str, values: Mapping[str, str]) -> Prompt:
        """Make a prompt of a template and what takes the place of its fields; see `tilebeam.LM.filled_prompt`."""
        return Prompt(filled_text(template, values))

    @overload
    def chat(
        self, messages: Messages, sampling: SamplingParams | None = ..., **fields: Unpack[SamplingFields]
    ) -> RequestOutput: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], sampling: SamplingParams | None = ..., **fields: Unpack[SamplingFields]
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer in one conversation, or in several; see `tilebeam.LM.chat`."""
        one = is_messages(messages)
        talks = cast(Sequence[Messages], [messages] if one else messages)
        found = self.generate([self.chat_prompt(talk) for talk in talks], sampling, **fields)
        return found[0] if one else found

    def generate(
        self,
        prompts: str | Prompt | Messages | Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[RequestOutput]:
        """Draw samples for each prompt. A text is what a user says; messages are a whole conversation.

        Args:
            prompts: one or several.
            sampling, progress, on_sample, fields: as for `tilebeam.LM.generate`.

        Raises:
            TilebeamError: the server cannot be reached or refuses, or something is asked for that no server gives.
        """
        one = is_one(prompts)
        talks = [self._conversation(p) for p in (cast(list[Any], [prompts] if one else prompts))]
        chosen = updated(sampling, fields)
        params = [p.resolved() for p in ([chosen] * len(talks) if isinstance(chosen, SamplingParams) else chosen)]
        if len(params) != len(talks):
            raise TilebeamError(f"{len(talks)} prompts but {len(params)} SamplingParams.")
        requests = [
            _request(p) | {"model": self.model, "messages": t.messages} for t, p in zip(talks, params, strict=True)
        ]
        # Samples that do not come are aborted.
        none = [[CompletionOutput(k, "", [], "aborted", p.sample_seed(k)) for k in range(p.n)] for p in params]
        outputs = [
            RequestOutput(talk.text, [], samples, Usage(), cast(int, p.seed))
            for talk, samples, p in zip(talks, none, params, strict=True)
        ]
        state = Progress(total=sum(p.n for p in params))
        running: dict[Future[tuple[list[CompletionOutput], Usage]], tuple[int, int, int]] = {}
        unwanted: set[int] = set()  # prompts
        pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="tilebeam-remote")

        def ask(i: int, place: int, n: int) -> None:
            """Ask for so many samples of a prompt, from that index on."""
            own = {"seed": params[i].sample_seed(place)} | ({"n": n} if n > 1 else {})
            create = partial(self._client.chat.completions.create, **requests[i], **own)
            running[pool.submit(_told_by, lambda: _drawn(create(), place, n, params[i]))] = i, place, n

        try:
            for i, p in enumerate(params):
                ask(i, 0, p.n)
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    i, place, n = running.pop(done)
                    fresh, usage = done.result()
                    outputs[i].usage += usage
                    outputs[i].outputs[place : place + len(fresh)] = fresh
                    for missing in range(place + len(fresh), place + n):  # of a server that knows no n
                        ask(i, missing, 1)
                    for sample in fresh:
                        state.finished, state.tokens = state.finished + 1, state.tokens + len(sample.token_ids)
                        if on_sample is not None:
                            unwanted.update(on_sample(i, sample) or ())
                for future in [future for future, (i, _, _) in running.items() if i in unwanted]:
                    future.cancel()  # the answer to one that is under way is not waited for
                    del running[future]
                if progress is not None and progress(state) is False:
                    break
        finally:  # nobody waits for requests under way whose answers nobody wants
            pool.shutdown(wait=False, cancel_futures=True)
        return outputs

    def _conversation(self, prompt: Any) -> _Conversation:
        if isinstance(prompt, _Conversation):
            return prompt
        if is_messages(prompt):
            return cast(_Conversation, self.chat_prompt(prompt))
        given = Prompt.of(prompt)
        if given.token_ids is not None:
            raise TilebeamError("This prompt holds token ids, which a server cannot read: pass messages or a text.")
        return _Conversation(given.text, question=given.question, messages=({"role": "user", "content": given.text},))


def _drawn(answer: Any, place: int, n: int, params: SamplingParams) -> tuple[list[CompletionOutput], Usage]:
    """Read the samples of an answer, from that index on and at most so many, and what they cost."""
    samples = [_sample(k, choice, params) for k, choice in enumerate(answer.choices[:n], place)]
    if not samples:
        raise TilebeamError("The server gave an answer without choices.")
    if (told := answer.usage) is None:
        return samples, Usage()
    cached = getattr(told.prompt_tokens_details, "cached_tokens", None) or 0
    return samples, Usage(int(told.prompt_tokens or 0), cached, int(told.completion_tokens or 0))


def _sample(index: int, choice: Any, params: SamplingParams) -> CompletionOutput:
    """Make a sample of a choice. Token ids are not told: -1 stands for each token whose log-probability is known."""
    told = None if choice.logprobs is None else choice.logprobs.content
    if params.logprobs and told is None:
        raise TilebeamError("The server tells no log-probabilities, which this search needs.")
    logprobs = [float(token.logprob) for token in told or ()]
    if any(map(math.isnan, logprobs)):
        raise ValueError("a log-probability is NaN")
    text: str = (choice.message.content or "").encode(errors="replace").decode()  # without halves of surrogate pairs
    # What a filter cut is no more an answer than what a limit cut.
    finish: FinishReason = "length" if choice.finish_reason in ("length", "content_filter") else "stop"
    return CompletionOutput(
        index,
        text,
        [-1] * len(logprobs),
        finish,
        params.sample_seed(index),
        cumulative_logprob=(sum(logprobs) if logprobs else -math.inf) if params.logprobs else None,
        logprobs=logprobs if params.logprobs else None,
        reasoning=getattr(choice.message, "reasoning_content", None),
        parsed=parsed_under(params.json_schema, text, finish),
    )


def _request(params: SamplingParams) -> dict[str, Any]:
    """Write sampling parameters as a request has them.

    Raises:
        TilebeamError: one of them is for models in this process.
    """
    usual = SamplingParams()
    changed = {name for name in FIELDS if getattr(params, name) != getattr(usual, name)}
    if unknown := sorted(changed - _SENT):
        raise TilebeamError(f"{unknown[0]} needs the model in this process, as tilebeam.load gives it.")
    request: dict[str, Any] = {name: value for name in _COMMON if (value := getattr(params, name)) is not None}
    if params.stop:
        request["stop"] = list(params.stop)
    if params.logprobs:
        request |= {"logprobs": True, **({"top_logprobs": params.top_logprobs} if params.top_logprobs else {})}
    if params.json_schema is not None:
        schema = {"name": "answer", "schema": params.json_schema, "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if more := {name: getattr(params, name) for name in _MORE if name in changed}:
        request["extra_body"] = more
    return request


def _told_by(ask: Callable[[], _T]) -> _T:
    """Ask a server; what goes wrong becomes a sentence."""
    import openai

    try:
        return ask()
    except openai.APIStatusError as error:
        raise TilebeamError(f"The server refused the request ({error.status_code}): {error.message}") from None
    except openai.APITimeoutError:
        raise TilebeamError("The server did not answer in time: give connect a longer timeout.") from None
    except openai.APIConnectionError as error:
        raise TilebeamError(f"No server can be reached: {error.__cause__ or error}") from None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise TilebeamError(
            f"The server does not answer as OpenAI's API does ({error}): does its address end in /v1?"
        ) from None


def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    at_once: int = AT_ONCE,
    timeout: float = 600.0,
    max_retries: int = 2,
) -> RemoteLM:
    """Use a server as the model of searches and judges: best-of-n, votes, scorers of texts.

    Args:
        url: of the API, like "http://127.0.0.1:8000/v1".
        model: its name there; None: the only one that the server has.
        api_key: None: that of the environment variable OPENAI_API_KEY, or none.
        at_once: requests under way at most.
        timeout: seconds for a request.
        max_retries: of a request that fails for a passing reason.

    Raises:
        TilebeamError: the package openai is missing, the server cannot be reached, or it has several models.
    """
    try:
        import openai
    except ImportError:
        raise TilebeamError(f"tilebeam.connect needs the package openai: {how_to_install('remote')}") from None
    checked_integer("at_once", at_once)
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=max_retries)
    if model is None:
        found = _told_by(lambda: [m.id for m in client.models.list().data])
        if len(found) != 1:
            raise TilebeamError(f"Which model? {url} has {', '.join(found) or 'none'}: connect(url, model=..).")
        model = found[0]
    return RemoteLM(client, model, at_once)
