"""From the messages of a request to the prompt of a chat, with errors that name the request's field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilebeam.chat.refused import FieldRefused
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import builtin_template_names
from tilebeam.search.tool_reasoning import conversation
from tilebeam.server.errors import bad_request, refused
from tilebeam.server.searches import runs_programs

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
    messages = [message.as_dict() for message in body.messages]
    if runs_programs(body.search) and not any(m["role"] in ("system", "developer") for m in messages):
        messages = [*conversation("")[:-1], *messages]
    # llama.cpp's own templates have no variables, nor use for an effort.
    own = (body.chat_template_kwargs or {}) if template in builtin_template_names() else body.template_variables
    try:
        prompt = lm.chat_prompt(
            messages,
            template=template,
            continue_final_message=bool(body.continue_final_message),
            tools=body.functions if body.calls else (),
            chat_template_kwargs={**(variables or {}), **own},
        )
        return prompt.text, prompt.token_ids
    except FieldRefused as error:
        raise refused(error) from None
    except TilebeamError as error:
        if lm.failure is not None:
            raise
        raise bad_request(f"{error} Or start the server with --chat-template.", code="no_chat_template") from None
