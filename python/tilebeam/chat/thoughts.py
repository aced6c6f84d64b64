"""What a model thinks before it answers, told apart from its answer, piece by piece.

A chat template tells which marks stand around thoughts. They begin an answer, or the prompt has opened them already;
marks that come later are text, but for one that is written again where it stands already: it is dropped. gpt-oss writes
each part of an answer as a message of a channel, the thoughts too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_SPACE = " \t\r\n"


class Marks(NamedTuple):
    """What stands around thoughts."""

    opens: str
    closes: str


THINK = Marks("<think>", "</think>")
CHANNELS = Marks("<|channel|>analysis<|message|>", "<|end|>")
# Marks, and the texts that tell of them in a template; the first of which it has all.
_TOLD_BY = (
    (CHANNELS, ("<|channel|>analysis<|message|>",)),
    (Marks("[THINK]", "[/THINK]"), ("[/THINK]",)),
    (Marks("<|START_THINKING|>", "<|END_THINKING|>"), ("<|END_THINKING|>",)),
    (Marks("<seed:think>", "</seed:think>"), ("</seed:think>",)),
    (Marks("<|inner_prefix|>", "<|inner_suffix|>"), ("<|inner_suffix|>",)),
    (Marks("<|channel>thought", "<channel|>"), ("<channel|>",)),
    (Marks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"), ("[BEGIN FINAL RESPONSE]",)),
)
_HEADER_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.:-]+)")


class Thinking(NamedTuple):
    """How the thoughts of an answer are read, and told.

    Attributes:
        marks: around them.
        opened: the answer begins with the rest of one.
        separate: they are told apart from the text; else they are text, marks and all, in which nothing is called.
    """

    marks: Marks
    opened: bool = False
    separate: bool = True

    def reader(self) -> ThoughtReader | ChannelReader:
        """Make a reader of one answer."""
        kind = (self.opened, not self.separate)
        return ChannelReader(*kind) if self.marks == CHANNELS else ThoughtReader(self.marks, *kind)


class TextPiece(NamedTuple):
    """Text of an answer, or a thought."""

    text: str
    thought: bool


def marks_of(template: str) -> Marks:
    """Return what stands around the thoughts of a model with this template."""
    return next((marks for marks, texts in _TOLD_BY if all(text in template for text in texts)), THINK)


def has_thoughts(template: str) -> bool:
    """Tell whether a template says how its model thinks."""
    return marks_of(template) != THINK or any(mark in template for mark in THINK)


def texts_of(marks: Marks | None) -> tuple[str, ...]:
    """Return what has to be seen of an answer to read its thoughts, control tokens among it."""
    return _HEADER_MARKS if marks == CHANNELS else marks or ()


def is_open(prompt: str, continued: str | None, marks: Marks) -> bool:
    """Return whether an answer begins with the rest of a thought.

    Args:
        prompt: what the model reads.
        continued: the message at its end that the answer goes on with, None: it begins a new one.
        marks: around thoughts.
    """
    if continued is None:
        return prompt.rstrip().endswith(marks.opens.rstrip())
    before = prompt.removesuffix(continued).rstrip().endswith(marks.opens.rstrip())
    return (before or continued.lstrip().startswith(marks.opens)) and marks.closes not in continued


class ThoughtReader:
    """Reads one answer.

    Args:
        marks: around thoughts.
        opened: it begins with the rest of one.
        kept: thoughts are told with their marks and the white space around them.
    """

    def __init__(self, marks: Marks, opened: bool, kept: bool) -> None:
        self._marks = marks
        self._kept = kept
        self._held = ""
        self._final = False
        self._begun = opened  # there was a thought, or is one
        self._told = False  # something of this thought
        self._state: Callable[[], bool] = self._opened if opened else self._begin
        self._pieces: list[TextPiece] = []

    def feed(self, text: str) -> list[TextPiece]:
        """Return what new text adds, as far as it is clear."""
        self._held += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> list[TextPiece]:
        """Return what is left when the answer ends."""
        self._final = True
        return self.feed("")

    def _begin(self) -> bool:
        """Read on while there is nothing but white space and thoughts."""
        opens = self._took(self._marks.opens)
        if opens:
            self._begun, self._told, self._state = True, False, self._opened
            return True
        closes = self._took(self._marks.closes) if self._begun else False
        if closes or opens is None or closes is None:
            return bool(closes)
        text = self._held.lstrip(_SPACE)
        if self._begun and self._kept:
            self._think(self._held[: len(self._held) - len(text)], mark=True)
        self._held = text if self._begun else self._held
        self._state = self._text
        return True

    def _opened(self) -> bool:
        """Read on within a thought of which there is nothing yet."""
        again = self._took(self._marks.opens)
        if again is False:
            self._state = self._inside
        return again is not None

    def _took(self, mark: str) -> bool | None:
        """Take a mark and white space before it off what is held; None: it is not clear whether there is one."""
        text = self._held.lstrip(_SPACE)
        if text.startswith(mark):
            self._think(self._held[: len(self._held) - len(text)] + mark, mark=True)
            self._held = text[len(mark) :]
            return True
        return None if mark.startswith(text) and not self._final else False

    def _inside(self) -> bool:
        """Read on within a thought."""
        mark = self._marks.closes
        at = self._held.find(mark)
        if at >= 0:
            self._think(self._held[:at].rstrip(_SPACE))
            self._think(self._held[len(self._held[:at].rstrip(_SPACE)) : at + len(mark)], mark=True)
            self._held = self._held[at + len(mark) :]
            self._state = self._begin
            return True
        keep = 0 if self._final else half_mark(self._held, (mark,))
        while keep < len(self._held) and self._held[-keep - 1] in _SPACE:
            keep += 1
        self._think(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        if self._final:
            self._think(self._held, mark=True)
            self._held = ""
        return False

    def _text(self) -> bool:
        """Read on behind all thoughts."""
        if self._held:
            self._pieces.append(TextPiece(self._held, False))
        self._held = ""
        return False

    def _think(self, text: str, mark: bool = False) -> None:
        """Tell a thought, or what is around one."""
        if mark and not self._kept:
            return
        if not self._told and not self._kept:
            text = text.lstrip(_SPACE)
        if text:
            self._told = self._told or not mark
            self._pieces.append(TextPiece(text, True))


class ChannelReader:
    """Reads one answer of gpt-oss: messages, each with a header that names its channel and whom it is for. What is for
    a function comes out as text in one form: <|channel|>commentary to=functions.NAME<|message|>{..}.

    Args:
        opened: it begins within a thought.
        kept: thoughts are told with their marks.
    """

    def __init__(self, opened: bool, kept: bool) -> None:
        self._kept = kept
        self._held = ""
        self._final = False
        self._body = self._thinks = opened

    def feed(self, text: str) -> list[TextPiece]:
        """Return what new text adds, as far as it is clear."""
        self._held += text
        pieces: list[TextPiece] = []
        while (piece := self._next()) is not None:
            if piece.text:
                pieces.append(piece)
        return pieces

    def end(self) -> list[TextPiece]:
        """Return what is left when the answer ends."""
        self._final = True
        return self.feed("")

    def _next(self) -> TextPiece | None:
        if not self._body:
            return self._read_header()
        places = [(at, mark) for mark in _HEADER_MARKS if (at := self._held.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            told, self._held = self._held[:at], self._held[at:]
            self._body = False
            if mark in ("<|end|>", "<|call|>", "<|return|>"):
                self._held = self._held[len(mark) :]
            return TextPiece(told + (mark if self._kept and self._thinks else ""), self._thinks)
        keep = 0 if self._final else half_mark(self._held, _HEADER_MARKS)
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return TextPiece(told, self._thinks) if told else None

    def _read_header(self) -> TextPiece | None:
        """Read what comes before a message; without marks there is none."""
        text = self._held
        begins = text.lstrip(_SPACE)
        marks = (*_HEADER_MARKS, "assistant", "to=functions.")
        if not any(begins.startswith(m) or m.startswith(begins) for m in marks):
            self._body, self._thinks = True, False
            return TextPiece("", False)
        at = text.find("<|message|>")
        if at >= 0:
            header, self._held = text[:at], text[at + len("<|message|>") :]
            self._body = True
            self._thinks = "<|channel|>analysis" in header and "to=" not in header
            if found := _RECIPIENT.search(header):
                return TextPiece(f"<|channel|>commentary to=functions.{found[1]}<|message|>", False)
            return TextPiece(CHANNELS.opens if self._thinks and self._kept else "", True)
        if not self._final:
            return None
        if any(mark in text for mark in _HEADER_MARKS):  # half a header is no text
            self._held = ""
        self._body, self._thinks = bool(self._held), False
        return TextPiece("", False) if self._held else None


def half_mark(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin one of these marks."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
