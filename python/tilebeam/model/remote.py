"""A server as the model: searches over any OpenAI-compatible server, such as vLLM, llama-server or Tilebeam's own.

    lm = tilebeam.connect("http://127.0.0.1:8000/v1", model="qwen")
    tilebeam.SelfConsistency("last-number").infer(lm, "Natalia sold ...", budget=16)

A server gives texts and log-probabilities: best-of-n, votes and judges that write numbers work. What reads tokens,
logits or hidden states (adaptive votes, searches by steps, reward heads) needs `tilebeam.load`, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, Unpack, cast

from tilebeam.chat.chat_prompt import filled_text
from tilebeam.errors import TilebeamError
from tilebeam.outputs import (
    CompletionOutput,
    FinishReason,
    Progress,
    ProgressHook,
    RequestOutput,
    SampleHook,
    Usage,
)
from tilebeam.prompt import Messages, Prompt, is_messages
from tilebeam.sampling_params import FIELDS, SamplingFields, SamplingParams, updated

AT_ONCE = 16  # requests under way
# Fields that every server takes, by their names there.
_COMMON = {name: name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "max_tokens")}
# Fields that OpenAI's own API lacks, and others have: sent where they are not the default.
_MORE = {"top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repeat_penalty", "min_tokens": "min_tokens"}
_MORE |= {"ignore_eos": "ignore_eos", "grammar": "grammar"}
_SENT = {*_COMMON, *_MORE, "n", "stop", "seed", "logprobs", "top_logprobs", "json_schema", "speculate"}
_FINISHES: dict[str | None, FinishReason] = {"length": "length", "tool_calls": "tool_calls"}


@dataclass(frozen=True)
class _Conversation(Prompt):
    """A prompt whose messages the server puts into its template."""

    messages: tuple[Any, ...] = field(default=(), hash=False)


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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TilebeamError(
            f"{name} needs the model in this process, as tilebeam.load gives it; {self.url} gives texts only."
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def chat_prompt(self, messages: Messages) -> Prompt:
        """Make the prompt of a conversation; the server has the template. Its question is what the user said last."""
        said = [str(turn.get("content") or "") for turn in messages]
        asked = [text for turn, text in zip(messages, said, strict=True) if turn.get("role") == "user"]
        return _Conversation("\n\n".join(said), question=asked[-1] if asked else None, messages=tuple(messages))

    def filled_prompt(self, template: str, values: dict[str, str]) -> Prompt:
        """Make a prompt of a template and what takes the place of its fields; see `tilebeam.LM.filled_prompt`."""
        return Prompt(filled_text(template, values))

    def chat(
        self, messages: Messages, sampling: SamplingParams | None = None, **fields: Unpack[SamplingFields]
    ) -> RequestOutput:
        """Answer in a conversation."""
        return self.generate([self.chat_prompt(messages)], sampling, **fields)[0]

    def generate(
        self,
        prompts: str | Prompt | Messages | Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[RequestOutput]:
        """Draw samples for each prompt. A text is what a user says; `chat_prompt` takes whole conversations.

        Args:
            prompts: one or several.
            sampling, progress, on_sample, fields: as for `tilebeam.LM.generate`.

        Raises:
            TilebeamError: the server cannot be reached or refuses, or something is asked for that no server gives.
        """
        one = isinstance(prompts, str | Prompt) or is_messages(prompts)
        asked = [self._conversation(p) for p in (cast(list[Any], [prompts] if one else prompts))]
        chosen = updated(sampling, fields)
        params = [p.resolved() for p in ([chosen] * len(asked) if isinstance(chosen, SamplingParams) else chosen)]
        if len(params) != len(asked):
            raise TilebeamError(f"{len(asked)} prompts but {len(params)} SamplingParams.")
        calls = [_Call(self, talk, p) for talk, p in zip(asked, params, strict=True)]
        state = Progress(total=sum(p.n for p in params))
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="tilebeam-remote") as pool:
            running: dict[Future[None], int] = {
                pool.submit(call.ask, 0, p.n): i for i, (call, p) in enumerate(zip(calls, params, strict=True))
            }
            try:
                while running:
                    done = next(as_completed(running))
                    i = running.pop(done)
                    done.result()
                    for place in calls[i].missing():
                        running[pool.submit(calls[i].ask, place, 1)] = i
                    for sample in calls[i].news():
                        state.finished, state.tokens = state.finished + 1, state.tokens + len(sample.token_ids)
                        if on_sample is not None:
                            on_sample(i, sample)
                    if progress is not None and progress(state) is False:
                        break
            finally:
                pool.shutdown(cancel_futures=True)
        return [call.output() for call in calls]

    def _conversation(self, prompt: Any) -> _Conversation:
        if isinstance(prompt, _Conversation):
            return prompt
        if is_messages(prompt):
            return cast(_Conversation, self.chat_prompt(prompt))
        given = Prompt.of(prompt)
        if given.token_ids is not None:
            raise TilebeamError("This prompt holds token ids, which a server cannot read: pass messages or a text.")
        return _Conversation(given.text, question=given.question, messages=({"role": "user", "content": given.text},))


class _Call:
    """One prompt's samples while they come.

    Attributes:
        samples: by their index.
    """

    def __init__(self, lm: RemoteLM, talk: _Conversation, params: SamplingParams) -> None:
        self._lm, self._talk, self._params = lm, talk, params
        self._request = _request(params)
        self._told: set[int] = set()
        self._split = False  # the server gives one sample a request
        self.samples: dict[int, CompletionOutput] = {}
        self.usage = Usage()

    def ask(self, place: int, n: int) -> None:
        """Ask for so many samples from that index on."""
        seed = self._params.sample_seed(place)
        many = {"n": n} if n > 1 else {}
        client = self._lm._client.chat.completions
        answer = _told_by(
            lambda: client.create(
                model=self._lm.model, messages=self._talk.messages, seed=seed, **many, **self._request
            )
        )
        if not answer.choices:
            raise TilebeamError(f"{self._lm.url} gave an answer without choices.")
        for i, given in enumerate(answer.choices[:n], place):
            self.samples[i] = _sample(i, given, self._params)
        if answer.usage is not None:
            self.usage += Usage(
                prompt_tokens=answer.usage.prompt_tokens, completion_tokens=answer.usage.completion_tokens
            )

    def missing(self) -> list[int]:
        """Return the indices of samples that a server which knows no `n` has left out; asked once."""
        if self._split:
            return []
        self._split = True
        return [i for i in range(self._params.n) if i not in self.samples]

    def news(self) -> list[CompletionOutput]:
        """Return the samples that nobody was told of."""
        new = [s for i, s in sorted(self.samples.items()) if i not in self._told]
        self._told |= {s.index for s in new}
        return new

    def output(self) -> RequestOutput:
        """Return what came; samples that did not are aborted."""
        params = self._params
        outputs = [
            self.samples.get(i) or CompletionOutput(i, "", [], "aborted", params.sample_seed(i))
            for i in range(params.n)
        ]
        return RequestOutput(self._talk.text, [], outputs, self.usage, cast(int, params.seed))


def _sample(index: int, choice: Any, params: SamplingParams) -> CompletionOutput:
    """Make a sample of a choice. Token ids are not told: -1 stands for each token whose log-probability is known."""
    told = None if choice.logprobs is None else choice.logprobs.content
    if params.logprobs and told is None:
        raise TilebeamError("The server tells no log-probabilities, which this search needs.")
    logprobs = [float(token.logprob) for token in told or ()]
    return CompletionOutput(
        index,
        choice.message.content or "",
        [-1] * len(logprobs),
        _FINISHES.get(choice.finish_reason, "stop"),
        params.sample_seed(index),
        cumulative_logprob=sum(logprobs) if params.logprobs else None,
        logprobs=logprobs if params.logprobs else None,
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
    request: dict[str, Any] = {sent: getattr(params, name) for name, sent in _COMMON.items()}
    request = {name: value for name, value in request.items() if value is not None}
    if params.stop:
        request["stop"] = list(params.stop)
    if params.logprobs:
        request |= {"logprobs": True, **({"top_logprobs": params.top_logprobs} if params.top_logprobs else {})}
    if params.json_schema is not None:
        schema = {"name": "answer", "schema": params.json_schema, "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if more := {sent: getattr(params, name) for name, sent in _MORE.items() if name in changed}:
        request["extra_body"] = more
    return request


def _told_by(ask: Callable[[], Any]) -> Any:
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
    import os

    try:
        import openai
    except ImportError:
        raise TilebeamError("tilebeam.connect needs the package openai: pip install openai") from None
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=max_retries)
    if model is None:
        found = [m.id for m in _told_by(lambda: client.models.list()).data]
        if len(found) != 1:
            raise TilebeamError(f"Which model? {url} has {', '.join(found) or 'none'}: connect(url, model=..).")
        model = found[0]
    return RemoteLM(client, model, at_once)
