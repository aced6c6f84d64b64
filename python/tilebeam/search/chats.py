"""Searches among the answers of chats: candidates that call functions are compared by their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tilebeam.chat.prepared import PreparedChat
from tilebeam.outputs import ProgressHook, RequestOutput, SampleHook
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams, one_each


class ChatGenerator:
    """A model whose samples for chats are as `PreparedChat.as_candidate` has them; a `Generator` over another one.

    Args:
        lm: the model.
        chat_of: finds the chat of a prompt. Samples for prompts without one are texts as they are.
    """

    def __init__(self, lm: Any, chat_of: Callable[[Prompt], PreparedChat | None]) -> None:
        self._lm = lm
        self._chat_of = chat_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)  # but for `generate` it is the model

    def generate(
        self,
        prompts: Sequence[Prompt] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
    ) -> list[RequestOutput]:
        """Draw samples for each prompt, of a chat with its grammar; see `tilebeam.LM.generate`."""
        params = one_each(sampling, len(prompts))
        chats = [self._chat_of(p) if isinstance(p, Prompt) else None for p in prompts]
        told: dict[str, Any] = {"progress": progress}
        if on_sample is not None:
            told["on_sample"] = lambda i, s: on_sample(i, s if (chat := chats[i]) is None else chat.as_candidate(s))
        asked = [
            p if c is None else replace(p, grammar=c.params.grammar, shown_tokens=c.params.shown_tokens)
            for p, c in zip(params, chats, strict=True)
        ]
        return [
            output if chat is None else replace(output, outputs=[chat.as_candidate(s) for s in output.outputs])
            for output, chat in zip(self._lm.generate(prompts, asked, **told), chats, strict=True)
        ]
