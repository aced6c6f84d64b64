"""From the messages of a request to the prompt of a chat, with errors that name the request's field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilebeam.errors import TilebeamError
from tilebeam.model.chat_prompt import ControlTokensInMessage
from tilebeam.model.chat_template import MessagesRefused, VariablesRefused
from tilebeam.native.llama import builtin_template_names
from tilebeam.search.tool_reasoning import conversation
from tilebeam.server.errors import bad_request
from tilebeam.server.searches import runs_programs
from tilebeam.server.tools import turns_of

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.server.requests import ChatRequest


def prompt_of(
    lm: LM, body: ChatRequest, template: str | None = None, variables: Mapping[str, Any] | None = None
) -> tuple[str, list[int]]:
    """Text and tokens of a chat, up to where the assistant speaks; see `LM.chat_prompt`.

    Args:
        template, variables: what the server was started with; the request's variables come first.

    Raises:
        ApiError: a message holds what cannot be part of one, or there is no template that fits.
    """
    tools = (body.tools or ()) if body.calls else ()
    turns, told = turns_of(body.messages, tools, template or lm.chat_template or "")
    if runs_programs(body.search) and not any(turn["role"] == "system" for turn in turns):
        turns = [*conversation("")[:-1], *turns]
    continued = bool(body.continue_final_message)
    # llama.cpp's own templates have no variables, nor use for an effort.
    own = (body.chat_template_kwargs or {}) if template in builtin_template_names() else body.template_variables
    try:
        prompt = lm.chat_prompt(
            turns,
            template=template,
            continue_final_message=continued,
            tools=told,
            chat_template_kwargs={**(variables or {}), **own},
        )
        return prompt.text, prompt.ids
    except MessagesRefused as error:
        raise bad_request(f"messages: {error}", param="messages", code="invalid_value") from None
    except VariablesRefused as error:
        raise bad_request(str(error), param="chat_template_kwargs", code="invalid_value") from None
    except ControlTokensInMessage as error:
        raise bad_request(str(error), param="messages", code="control_tokens_in_message") from None
    except TilebeamError as error:
        if lm.failure is not None:
            raise
        raise bad_request(f"{error} Or start the server with --chat-template.", code="no_chat_template") from None
