"""The letter of a multiple-choice answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tilebeam.answers.extract import Extractor
from tilebeam.errors import TilebeamError

_LATIN = r"A-Za-z0-9\u00c0-\u024f"  # what a letter is part of a word with; Chinese has no blanks between words
# What a letter may be wrapped in. Repetitions are bounded or possessive, so that time is linear in the text.
_OPEN = r"(?:[\s*_`\"'“‘「『（【(\[<{$]|\\[(\[]|\\(?:text|math|mbox|boldsymbol|bm|boxed|fbox)[a-z]{0,8}\s?\{){0,8}+"
_CLOSE = r"(?:[*_`\"'”’」』）】)\]>}$]|\\[)\]])"
_END = rf"(?=\s*+$|{_CLOSE}|[.:,;!。，：；、])"
_IS = (
    r"(?:[\s*_:=：]|(?i:is|be|would|should|must|thus|therefore|option|choice|letter)\b|[是为為选選項项應应該该]){0,8}+"
)
_SO = (
    r"is|be|was|so|then|thus|hence|therefore|choose|chose|chosen|pick|picked|select|selected|with|for|say|guess|think|"
    r"believe|it['’]s|that['’]s|correct|final|letter"
)


def choice(letters: str = "ABCDE") -> Extractor:
    """Extract the letter of a multiple-choice answer: in a box, behind "answer", behind "option" or "choice", in
    parentheses, or by itself; of several of a kind the last one. Of two that are named together ("A and B") it is none.

    Args:
        letters: the capital letters that the choices have.

    Raises:
        TilebeamError: they are something else.
    """
    if not letters.isalpha() or letters != letters.upper():
        raise TilebeamError(f"choice() takes capital letters, not {letters!r}.")
    capital, small = f"[{letters}]", f"[{letters.lower()}]"
    unlike = rf"(?![{_LATIN}+#]|['’][a-z])"  # words, C++, A's
    joint = r"(?:\s*+(?:\\text\s?\{\s?)?(?:,\s?)?(?:and|or)\b\s?\}?|\s?[&/和或及与與、])"
    second = rf"{joint}{_OPEN}(?:{capital}|(?<=\(){small})|,{_OPEN}{capital}(?=\s*+$|[.,;)\]}}]|\s(?:and|or)\b)"
    other = rf"(?P<other>{_CLOSE}{{0,6}}+(?:{second}){unlike})?"
    # A small letter may be a word, or the beginning of "e.g.": something must end behind it.
    either = rf"{_OPEN}(?P<one>{capital}|{small}{_END}(?!\.[a-z])){unlike}{other}"
    wrapped = rf"(?<![^\W_])(?=(?:\*\*|[`\[<]){capital}[.):]?[*`\]>])"
    whole = re.compile(rf"{_OPEN}(?P<one>{capital}|{small})(?:\s|\.|{_CLOSE})*+")
    framed, answer, option, enclosed, line, alone = (
        re.compile(pattern, re.MULTILINE)
        for pattern in (
            rf"\\(?:boxed|fbox)\s*+\{{{either}(?=\s*+{_CLOSE}|[.:])",
            rf"(?:\b(?i:answer)\b|答案|[选選][择擇]?(?![项項])){_IS}{either}",
            rf"(?:\b(?i:choice|option)\b|[选選][项項]){_IS}{either}",
            rf"(?<![{_LATIN}])\((?P<one>{capital}|{small})\){other}",
            rf"^[\s>#•\-]{{0,6}}+{_OPEN}(?P<one>{capital}|{small}(?=[.)]\s)){unlike}{other}{_END}",
            rf"(?:(?<=[.!?;,])\s|(?<=[:=>→—…。，：；\u4e00-\u9fff])|{wrapped}|\b(?i:{_SO})\b)"
            rf"{_OPEN}(?P<one>{capital}){unlike}{other}{_END}",
        )
    )

    def mentions(text: str) -> Iterator[list[re.Match[str]]]:
        """Yield the mentions by kind, the surest first."""
        yield from ([*pattern.finditer(text)] for pattern in (framed, answer, option, enclosed))
        lines = [*line.finditer(text)]
        listed = len({m["one"].upper() for m in lines}) > 1  # the choices themselves
        yield sorted([*alone.finditer(text), *([] if listed else lines)], key=lambda m: m.start("one"))

    def extract(text: str) -> str | None:
        if only := whole.fullmatch(text):
            return only["one"].upper()
        for kind, found in enumerate(mentions(text)):
            if found and not found[-1]["other"]:
                return found[-1]["one"].upper()
            if found and kind < 2:  # "Answer: A and B" says what it is; "Options A and B are wrong" does not
                return None
        return None

    return extract
