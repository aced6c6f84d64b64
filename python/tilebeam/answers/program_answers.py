"""Answers that a text's own program computes, where it holds one: the program is run, instead of believing the number
that the model wrote behind it."""

from __future__ import annotations

from functools import lru_cache

from tilebeam.answers.code import python_blocks
from tilebeam.answers.extract import Extractor, equality_of, marked_number
from tilebeam.answers.normalize import checked_answer
from tilebeam.sandbox import need_confinement, run

SECONDS = 2  # of CPU time for a text's programs


class ProgramAnswer:
    """Extracts what a text's last program prints, else the value of its last line; of a text without a program, or with
    one that fails, prints nothing or does not end, what its words say.

    Programs run confined, the earlier ones of the text before the last, and see neither files nor network. Of what is
    printed the last line counts. In votes, a text whose words and program agree weighs twice.

    Args:
        words: extracts the answer from words, and from the printed line.
        unsafe: run programs even where they cannot be confined.

    Raises:
        TilebeamError: programs cannot be confined here, and `unsafe` is false.
    """

    def __init__(self, words: Extractor = marked_number, *, unsafe: bool = False) -> None:
        need_confinement(unsafe=unsafe)
        self.words = words
        self.equal = equality_of(words)
        self._unsafe = unsafe
        self._computed = lru_cache(maxsize=1024)(self._compute)  # votes ask for answers and weights

    def __call__(self, text: str) -> str | None:
        """Return the program's answer, else that of the words; None: there is neither."""
        computed = self._computed(text)
        return self.words(text) if computed is None else computed

    def weight(self, text: str) -> float:
        """Return what a text's vote weighs: 2 if its words and its program agree, else 1."""
        computed, said = self._computed(text), self.words(text)
        agree = computed is not None and said is not None and (computed == said or self.equal(computed, said))
        return 2.0 if agree else 1.0

    def _compute(self, text: str) -> str | None:
        *before, last = python_blocks(text) or [""]
        if not last.strip():
            return None
        said = run(last, before=before, timeout=SECONDS, unsafe=self._unsafe)
        if said.error or said.cut:
            return None
        *_, line = said.output.strip().splitlines() or [said.value or ""]
        if not line:
            return None
        found = checked_answer(self.words(line))
        return self.words(f"\\boxed{{{line}}}") if found is None else found
