"""Messages in, answers out: the part of a loaded model that holds conversations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, cast, overload

from tilebeam.chat.prepared import PreparedChat, bound, thinking_of, with_forcing
from tilebeam.chat.thoughts import Marks, has_thoughts, marks_of
from tilebeam.chat.tools import Tool, ToolChoice, tool_use, tools_of
from tilebeam.errors import TilebeamError
from tilebeam.model.generating import Generating
from tilebeam.outputs import Delta, ProgressHook, RequestOutput
from tilebeam.prompt import Messages, is_messages
from tilebeam.sampling_params import SamplingFields, SamplingParams, updated


class ChatFields(SamplingFields, total=False):
    """Options of `Chatting.prepare_chat`, and fields of `SamplingParams`, for type checkers and editors."""

    tools: Sequence[Mapping[str, Any] | Tool] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    reasoning: Literal["apart", "text"]
    template: str | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class Chatting(Generating):
    """`chat` and its kin."""

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = ...,
        *,
        progress: ProgressHook | None = ...,
        **options: Unpack[ChatFields],
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        sampling: SamplingParams | None = ...,
        *,
        progress: ProgressHook | None = ...,
        **options: Unpack[ChatFields],
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | None = None,
        *,
        progress: ProgressHook | None = None,
        **options: Unpack[ChatFields],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer in a conversation: the chat template, `generate`, and thoughts and calls told apart from the text.

            lm.chat([{"role": "user", "content": "Hi!"}], max_tokens=64).text
            for delta in lm.stream_chat(messages):
                print(delta.text, end="", flush=True)

        Functions that the model may call:

            answer = lm.chat(messages, tools=tools).outputs[0]
            messages.append(answer.message)
            for call in answer.tool_calls:
                result = functions[call.name](**json.loads(call.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

        Args:
            messages: the turns, see `chat_prompt`; or several conversations, which are answered together.
            sampling: how to sample.
            progress: as for `generate`.
            options: those of `prepare_chat`, and fields of `SamplingParams` by name.

        Returns:
            The prompt and its answers, each with `text`, `reasoning` and `tool_calls`; a list for several
            conversations.

        Raises:
            TilebeamError: as `prepare_chat` and `generate`.
        """
        chats = self._prepared(messages, sampling, options)
        found = self.generate([c.prompt for c in chats], [c.params for c in chats], progress=progress)
        return _answers(messages, chats, found)

    @overload
    async def achat(
        self, messages: Messages, sampling: SamplingParams | None = ..., **options: Unpack[ChatFields]
    ) -> RequestOutput: ...
    @overload
    async def achat(
        self, messages: Sequence[Messages], sampling: SamplingParams | None = ..., **options: Unpack[ChatFields]
    ) -> list[RequestOutput]: ...
    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatFields],
    ) -> RequestOutput | list[RequestOutput]:
        """Do what `chat` does, for coroutines; see `agenerate`."""
        chats = self._prepared(messages, sampling, options)
        return _answers(messages, chats, await self.agenerate([c.prompt for c in chats], [c.params for c in chats]))

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, **options: Unpack[ChatFields]
    ) -> Iterator[Delta]:
        """Answer in a conversation and get the answer as it grows; see `chat`.

        Returns:
            An iterator of `Delta`, each with what `text`, `reasoning` and `tool_calls` grew by.

        Raises:
            TilebeamError: as `prepare_chat`; what goes wrong while decoding is raised by the iterator.
        """
        chat = self.prepare_chat(messages, sampling, **options)
        return chat.read_stream(self.stream(chat.prompt, chat.params))

    def astream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, **options: Unpack[ChatFields]
    ) -> AsyncIterator[Delta]:
        """Do what `stream_chat` does, for coroutines: to be called in one, an async iterator."""
        chat = self.prepare_chat(messages, sampling, **options)
        return chat.aread_stream(self.astream(chat.prompt, chat.params))

    def _prepared(
        self, messages: Messages | Sequence[Messages], sampling: SamplingParams | None, options: ChatFields
    ) -> list[PreparedChat]:
        talks = [messages] if _is_one(messages) else messages
        return [self.prepare_chat(cast(Messages, talk), sampling, **options) for talk in talks]

    def prepare_chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any] | Tool] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        reasoning: Literal["apart", "text"] = "apart",
        template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[SamplingFields],
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
        schema = params.json_schema
        text = template or self.chat_template or ""
        offered = tools_of(tools)
        use = tool_use(offered, tool_choice, text, several=parallel_tool_calls)
        separate = reasoning == "apart"
        known = Marks(*params.thinking_marks) if params.thinking_marks else marks_of(text)
        marks = known if separate or use is not None else None
        prompt = self.chat_prompt(
            messages,
            template=template,
            continue_final_message=continue_final_message,
            tools=offered if use is not None else (),
            chat_template_kwargs=chat_template_kwargs,
        )
        params = bound(params, self, use, marks)
        continued = (messages[-1].get("content") or "") if continue_final_message else None
        if params.forces:
            held = params.grammar is not None and (use is None or use.forced)
            opens = held and (params.thinking_marks is not None or has_thoughts(text))
            prompt, params = with_forcing(prompt, continued, params, self, known, opens=opens)
        thinking = None if marks is None else thinking_of(prompt, continued, params, use, marks, separate)
        return PreparedChat(prompt, params, use, thinking, schema)


def _is_one(messages: Messages | Sequence[Messages]) -> bool:
    """Tell one conversation from several; an empty list is one, which the template refuses."""
    return not messages or is_messages(messages)


def _answers(
    messages: Messages | Sequence[Messages], chats: Sequence[PreparedChat], outputs: Sequence[RequestOutput]
) -> RequestOutput | list[RequestOutput]:
    found = [chat.read(output) for chat, output in zip(chats, outputs, strict=True)]
    return found[0] if _is_one(messages) else found
