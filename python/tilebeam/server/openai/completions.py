"""/v1/completions: how answers are written."""

from __future__ import annotations

from collections.abc import Sequence

from tilebeam.chat.answer_parts import text_in
from tilebeam.server.answer_events import Grown, Json, Shown, token_text
from tilebeam.server.openai.choice_answer import ChoicesAnswer


class CompletionAnswer(ChoicesAnswer):
    """Writes texts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, grown: Grown) -> Json:
        """Write a choice, or a piece of one, which looks alike."""
        logprobs = None if grown.tokens is None else self._told(grown.tokens)
        return {
            "text": text_in(grown.parts),
            "index": grown.index,
            "logprobs": logprobs,
            "finish_reason": grown.finish,
        }

    def pieces(self, grown: Grown) -> list[Json]:
        """Write what a choice grew by."""
        return [self.choice(grown)]

    def _told(self, tokens: Sequence[Shown]) -> Json:
        """Write lists side by side, an entry per token."""
        tops: list[Json] = []
        for shown in tokens:
            named: Json = {}
            for piece, logprob in self._entries(shown):
                named.setdefault(token_text(piece), logprob)  # the likeliest of those that look alike
            tops.append(named)
        known = not any(shown.top is None for shown in tokens)
        return {
            "tokens": [token_text(self._spelling(shown.token)) for shown in tokens],
            "token_logprobs": [shown.logprob for shown in tokens],
            "top_logprobs": tops if self._top and known else None,
            "text_offset": [shown.start for shown in tokens],
        }
