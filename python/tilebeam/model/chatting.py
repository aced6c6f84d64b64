"""Messages in, answers out: the part of a loaded model that holds conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tilebeam.chat.prepared import PreparedChat, bound, thinking_of
from tilebeam.chat.thoughts import marks_of
from tilebeam.chat.tools import Tool, ToolChoice, tool_use, tools_of
from tilebeam.errors import TilebeamError
from tilebeam.model.generating import Generating
from tilebeam.outputs import Delta, ProgressHook, RequestOutput
from tilebeam.sampling_params import SamplingParams, updated


class Chatting(Generating):
    """`chat` and its kin."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        progress: ProgressHook | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer in a conversation: the chat template, `generate`, and thoughts and calls told apart from the text.

            lm.chat([{"role": "user", "content": "Hi!"}], max_tokens=64).outputs[0].text

        Functions that the model may call:

            answer = lm.chat(messages, tools=tools).outputs[0]
            messages.append(answer.message)
            for call in answer.tool_calls:
                result = functions[call.name](**json.loads(call.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

        Args:
            messages: the turns; see `chat_prompt`.
            sampling: how to sample.
            progress: as for `generate`.
            options: those of `prepare_chat`, and fields of `SamplingParams` by name.

        Returns:
            The prompt and its answers, each with `text`, `reasoning` and `tool_calls`.

        Raises:
            TilebeamError: as `prepare_chat` and `generate`.
        """
        chat = self.prepare_chat(messages, sampling, **options)
        return chat.read(self.generate([chat.prompt], chat.params, progress=progress)[0])

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Answer in a conversation and get the answer as it grows; see `chat`.

        Returns:
            An iterator of `Delta`, each with what `text`, `reasoning` and `tool_calls` grew by.

        Raises:
            TilebeamError: as `prepare_chat`; what goes wrong while decoding is raised by the iterator.
        """
        chat = self.prepare_chat(messages, sampling, **options)
        return chat.read_stream(self.stream(chat.prompt, chat.params))

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        reasoning: Literal["apart", "text"] = "apart",
        template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> PreparedChat:
        """Make a chat ready to be answered: what the model reads, how to sample, and how the answer is read.

            chat = lm.prepare_chat(messages, tools=tools)
            (output,) = await lm.agenerate(chat.prompt, chat.params)
            answer = chat.read(output).outputs[0]

        Args:
            messages, template, continue_final_message, chat_template_kwargs: see `chat_prompt`.
            sampling: how to sample.
            tools: functions that the model may call, as OpenAI's API describes them.
            tool_choice: "auto" (or None), "required": the answer calls at least one; "none"; or the function to call,
                {"type": "function", "function": {"name": ..}}. Calls that must be are valid under their schemas.
            parallel_tool_calls: an answer may have more than one call.
            reasoning: tell the model's thoughts apart from its text, or leave them in it, marks and all.
            fields: of `SamplingParams`, by name.

        Raises:
            TilebeamError: as `chat_prompt`; a function takes no object, or no grammar can be made of its parameters.
        """
        if reasoning not in ("apart", "text"):
            raise TilebeamError(f'reasoning must be "apart" or "text", not {reasoning!r}.')
        params = updated(sampling, fields)
        if not isinstance(params, SamplingParams):
            raise TilebeamError("A chat is one prompt: it takes one SamplingParams.")
        text = template or self.chat_template or ""
        offered = tools_of(tools)
        use = tool_use(offered, tool_choice, text, several=parallel_tool_calls)
        separate = reasoning == "apart"
        marks = marks_of(text) if separate or use is not None else None
        prompt = self.chat_prompt(
            messages,
            template=template,
            continue_final_message=continue_final_message,
            tools=offered if use is not None else (),
            chat_template_kwargs=chat_template_kwargs,
        )
        params = bound(params, self, use, marks)
        continued = (messages[-1].get("content") or "") if continue_final_message else None
        thinking = None if marks is None else thinking_of(prompt, continued, params, use, marks, separate)
        return PreparedChat(prompt, params, use, thinking)
