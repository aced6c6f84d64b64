"""The prompts of completions: texts or token ids, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.native import llama
from tilebeam.prompt import Prompt
from tilebeam.server.errors import bad_request

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def completion_prompt(lm: LM, given: str | list[int]) -> Prompt:
    """Return a prompt of /v1/completions.

    Args:
        given: the text, or its tokens.

    Raises:
        ApiError: a token that the model does not have.
    """
    if isinstance(given, str):
        return Prompt(given, lm.tokenize(given))
    check_tokens(lm, given, "prompt")
    return Prompt(lm.detokenize(given), given)


def check_tokens(lm: LM, ids: Sequence[int], param: str) -> None:
    """Raise `ApiError` for a token that the model does not have."""
    try:
        llama.check_tokens(ids, lm.n_vocab, param)
    except TilebeamError as error:
        raise bad_request(str(error), param=param) from None
