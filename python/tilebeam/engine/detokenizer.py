"""From token bytes to text, piece by piece: characters that span tokens, and stop strings that do."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Makes text of one sample's token bytes.

    ``text`` grows by whole characters; bytes that are no UTF-8 become U+FFFD. The first stop string to appear ends
    it: ``text`` then ends before that string.

    Args:
        stop: stop strings.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stop_string: str | None = None  # the one that appeared
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> bool:
        """Add the bytes of one or more tokens. True once a stop string has appeared."""
        new = self._decoder.decode(piece)
        if new and not self.stopped:
            # A stop string that ends in the new text starts at most this far before it.
            start = max(0, len(self.text) - self._longest + 1)
            self.text += new
            found = [(at, s) for s in self._stop if (at := self.text.find(s, start)) >= 0]
            if found:
                at, self.stop_string = min(found, key=lambda f: f[0])
                self.text = self.text[:at]
        return self.stopped

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has appeared."""
        return self.stop_string is not None

    def stable_length(self) -> int:
        """Return leading characters of ``text`` that no further token can cut: its end may begin a stop string."""
        if self.stopped or not self._stop:
            return len(self.text)
        for start in range(max(0, len(self.text) - self._longest + 1), len(self.text)):
            if any(s.startswith(self.text[start:]) for s in self._stop):
                return start
        return len(self.text)
