"""Tokens that a text is made to have: the end of thoughts whose budget is used up, and the beginning of an answer where
the text is about to be cut without one.

`Forcing` says what is forced, and when; `Forcer` follows one text, token by token, and sets its sampler for the next
draw. A forced token is drawn like any other: it has the model's own log-probability, and a draft may guess it. A
grammar that holds from the beginning of a text is not broken for it; one that waits for the end of thoughts is not
asked in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam.engine.sampler import Banned, Sampler
from tilebeam.native.llama import Vocab
from tilebeam.sampling_params import SamplingParams


@dataclass(frozen=True)
class Forcing:
    """What is forced upon the samples of a prompt.

    Attributes:
        params: theirs.
        opens, closes: the marks around thoughts.
        opened: the text begins within a thought.
        anywhere: thoughts may begin behind other text, not only behind white space and thoughts.
        closing: the tokens that end a thought.
        closers: tokens that the mark that closes may begin with.
        answer: the tokens that begin an answer, none: they are not forced.
        sign: what a text holds that has an answer.
    """

    params: SamplingParams
    opens: bytes
    closes: bytes
    opened: bool
    anywhere: bool
    closing: list[int]
    closers: list[int]
    answer: list[int]
    sign: bytes

    @classmethod
    def of(
        cls, params: SamplingParams, vocab: Vocab, marks: tuple[str, str], *, opened: bool, anywhere: bool
    ) -> Forcing:
        """Make it of what is asked for.

        Args:
            params: with something to force.
            vocab: the model's.
            marks: around thoughts.
            opened, anywhere: see the attributes.

        Raises:
            TilebeamError: the model has no tokenizer.
        """
        opens, closes = marks

        def tokens(text: str) -> list[int]:
            return vocab.tokenize(text, False, False) if text else []

        def first(text: str) -> int:
            return next(t for t in vocab.tokenize(text, False, True) if vocab.spelling(t).strip())

        before, _, behind = params.budget_message.partition(closes)  # a message may bring the mark itself
        words = params.force_answer.split()
        sign = words[-1] if words and not words[-1].strip(":.,").isalpha() else params.force_answer.strip()
        return cls(
            params,
            opens.encode(),
            closes.encode(),
            opened,
            anywhere,
            closing=[*tokens(before), *vocab.tokenize(closes, False, True), *tokens(behind)],
            closers=sorted({first(space + closes) for space in ("", " ", "\n")}),
            answer=tokens(params.force_answer),
            sign=sign.encode(),
        )


class Forcer:
    """Follows one sample.

    Args:
        forcing: what is forced.
        vocab: the model's.
        sampler: of the sample.
        prompt: what the sample goes on from: the last `SamplingParams.continues` tokens of it are text already.
        limit: tokens that it may still have.

    Attributes:
        coming: the tokens that are forced next.
    """

    def __init__(self, forcing: Forcing, vocab: Vocab, sampler: Sampler, prompt: Sequence[int], limit: int) -> None:
        params = forcing.params
        self.coming: list[int] = []
        self._forcing, self._vocab, self._sampler = forcing, vocab, sampler
        self._inside = self._waits = forcing.opened
        self._begins = True  # there were only white space and thoughts yet
        self._held = b""  # the end of what was read, where a mark may have begun
        self._said = bytearray()  # behind the thoughts
        self._thought = 0  # tokens in thoughts
        self._drawn = -params.continues  # tokens
        self._limit = limit
        self._asks = bool(forcing.answer)
        self._plan()
        for token in prompt[len(prompt) - params.continues :]:
            self.take(token)

    def take(self, token: int) -> None:
        """Follow the text by a token, and set the sampler for the next one."""
        self._drawn += 1
        # Other tokens than those that are forced come of a grammar, or of what the text went on from.
        self.coming = self.coming[1:] if self.coming[:1] == [token] else []
        thought = self._inside
        self._follow(self._vocab.piece(token) or self._vocab.spelling(token).encode())
        self._thought += thought and self._inside  # the marks do not count
        self._plan()

    def _follow(self, piece: bytes) -> None:
        """Look for the marks."""
        forcing, self._held = self._forcing, self._held + piece
        while True:
            mark = forcing.closes if self._inside else forcing.opens
            if not self._inside and self._begins and not forcing.anywhere:
                self._held = self._held.lstrip()
                at = 0 if self._held.startswith(mark) else -1
                self._begins = at == 0 or mark.startswith(self._held)
            else:
                at = self._held.find(mark) if self._inside or forcing.anywhere else -1
            if at < 0:
                break
            self._held = self._held[at + len(mark) :]
            self._inside = not self._inside
            self._waits = self._waits and self._inside
            piece = self._held
        if not self._inside:
            self._said += piece
        self._held = self._held[-max(len(forcing.opens), len(forcing.closes), 4) :]

    def _plan(self) -> None:
        """Set the sampler for the next token."""
        forcing, params = self._forcing, self._forcing.params
        if not self.coming and self._is_whole():
            if self._asks and self._limit - self._drawn <= params.answer_tokens:
                self._asks = False
                if forcing.sign not in self._said:
                    self.coming = [*(forcing.closing if self._inside else ()), *forcing.answer]
            elif self._inside and params.thinking_budget is not None and self._thought >= params.thinking_budget:
                self.coming = forcing.closing
        waits = self._waits and params.grammar is not None
        banned = Banned.ENDS if waits or self._drawn < params.min_tokens else Banned.NOTHING
        if self._inside and self._thought < params.min_thinking:
            banned = Banned.CLOSING
        self._sampler.steer(self.coming[0] if self.coming else None, banned, free=waits)

    def _is_whole(self) -> bool:
        """Tell whether the text ends neither within a character nor with the beginning of a mark that closes."""
        closes, held = self._forcing.closes, self._held
        if self._inside and any(held.endswith(closes[:n]) for n in range(1, len(closes))):
            return False
        for back, byte in enumerate(reversed(held[-3:]), 1):
            if byte & 0xC0 != 0x80:
                return byte < 0xC0 or back > 1 + (byte >= 0xE0) + (byte >= 0xF0)
        return True
