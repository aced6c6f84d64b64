"""/v1/completions: how answers are written."""

from __future__ import annotations

from collections.abc import Sequence

from tilebeam.chat.answer_parts import text_in
from tilebeam.server.answer_events import Grown, Json, Shown, Started, token_text
from tilebeam.server.openai.choice_answer import ChoicesAnswer


class CompletionAnswer(ChoicesAnswer):
    """Writes texts, which may begin with their prompts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, grown: Grown, started: Started) -> Json:
        """Write a complete choice."""
        echo = started.echo
        before = echo.text if echo is not None else ""
        logprobs = None
        if grown.tokens is not None:
            logprobs = self._told(grown.tokens, len(before), echo.tokens if echo is not None else ())
        return _choice(grown.index, before + text_in(grown.parts), logprobs, grown.finish)

    def opening(self, started: Started) -> Json | None:
        """Write the prompt, if it was to be echoed."""
        echo = started.echo
        if echo is None:
            return None
        return _choice(started.index, echo.text, self._told((), 0, echo.tokens) if echo.tokens else None, None)

    def pieces(self, grown: Grown, started: Started) -> list[Json]:
        """Write a piece, which looks like a complete choice."""
        offset = len(started.echo.text) if started.echo is not None else 0
        logprobs = None if grown.tokens is None else self._told(grown.tokens, offset)
        return [_choice(grown.index, text_in(grown.parts), logprobs, grown.finish)]

    def _told(self, tokens: Sequence[Shown], offset: int, before: Sequence[Shown] = ()) -> Json:
        """Write lists side by side, an entry per token; offsets are in characters of the whole text.

        Args:
            tokens: of the text.
            offset: characters that went before it.
            before: tokens in these.
        """
        listed = [*before, *tokens]
        tops: list[Json | None] = []
        for shown in listed:
            named: dict[str, float] = {}
            for piece, logprob in self._entries(shown):
                named.setdefault(token_text(piece), logprob)  # the likeliest of those that look alike
            tops.append(None if shown.logprob is None else named)
        known = not any(shown.top is None and shown.logprob is not None for shown in listed)
        return {
            "tokens": [token_text(self._spelling(shown.token)) for shown in listed],
            "token_logprobs": [shown.logprob for shown in listed],
            "top_logprobs": tops if self._top and known else None,
            "text_offset": [shown.start for shown in before] + [offset + shown.start for shown in tokens],
        }


def _choice(index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
