"""Texts that a request has read: checked, and in groups, between which is seen whether its client still waits."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import bad_request

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

MOST_TEXTS = 2048  # of one request
# Tokens of texts that are read before it is seen whether the client still waits.
_AT_ONCE = 2048


def read_groups(texts: Iterable[list[int]], stopped: threading.Event) -> Iterator[list[list[int]]]:
    """Yield texts to be read together.

    Raises:
        ClientGone: nobody waits for the texts any more.
    """
    group: list[list[int]] = []
    tokens = 0
    for text in texts:
        if stopped.is_set():
            raise ClientGone
        if group and tokens + len(text) > _AT_ONCE:
            yield group
            group, tokens = [], 0
        group.append(text)
        tokens += len(text)
    yield group


def check_length(lm: LM, ids: list[int], what: str, param: str) -> None:
    """Raise `ApiError` for a text that the model cannot read.

    Args:
        ids: its tokens.
        what: it is, for the error.
        param: the request's field.
    """
    if not ids:
        raise bad_request(f"{what} has no tokens.", param=param, code="invalid_value")
    if len(ids) > lm.longest_text:
        raise bad_request(
            f"{what} has {len(ids)} tokens; this model takes at most {lm.longest_text}.",
            param=param,
            code="context_length_exceeded",
        )
