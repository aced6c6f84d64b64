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


def completion_prompt(
    lm: LM, given: str | list[int], suffix: str | None = None, extra: Sequence[tuple[str, str]] = (), leave: int = 1
) -> Prompt:
    """A prompt of /v1/completions.

    Args:
        given: the text, or its tokens.
        suffix: what stands behind the text that is wanted, None: nothing.
        extra, leave: see `LM.infill_prompt`.

    Raises:
        ApiError: a token that the model does not have, or the model cannot fill gaps.
    """
    if not isinstance(given, str):
        check_tokens(lm, given, "prompt")
    text = given if isinstance(given, str) else lm.detokenize(given)
    if suffix is None:
        return Prompt(text, lm.tokenize(given) if isinstance(given, str) else given)
    try:
        return Prompt(text, lm.infill_prompt(given, suffix, extra=extra, leave=leave))
    except TilebeamError as error:
        if lm.failure is not None:
            raise
        raise bad_request(f"suffix: {error}", param="suffix", code="no_infill") from None


def check_tokens(lm: LM, ids: Sequence[int], param: str) -> None:
    """Raise `ApiError` for a token that the model does not have."""
    try:
        llama.check_tokens(ids, lm.n_vocab, param)
    except TilebeamError as error:
        raise bad_request(str(error), param=param) from None
