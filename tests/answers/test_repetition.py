"""Which texts loop, and which only have things alike."""

from __future__ import annotations

import pytest
from tilebeam.answers.repetition import repeats_itself

LIGHT = "The sky is blue because blue light is scattered more than red light. "
LOOPS = {
    "a sentence": "Here is why. " + LIGHT * 5,
    "cut inside": "Here is why. " + LIGHT * 5 + "The sky is blue bec",
    "two sentences in turn": (LIGHT + "That is called Rayleigh scattering. ") * 3,
    "a paragraph, twice": "Dear Ann,\n\n" + (LIGHT * 2 + "I remain, with many thanks, yours truly.\n\n") * 2,
    "items of a list": "Three ways:\n" + "".join(f"\n{i}. Toast it in a pan with some oil." for i in range(1, 12)),
    "a formula": r"So x is \(\frac{8D}{2} " + r"= \frac{1}{2}S - \frac{8D}{2} " * 9,
    "words": "It was very " + "very " * 40,
    "German": "Also: " + "Das Licht wird gestreut, und darum ist der Himmel blau. " * 4,
    "Russian": "Итак, " + "небо голубое, потому что свет рассеивается. " * 4,
    "Chinese": "答案：" + "天空是蓝色的，因为光被散射了。" * 5,
    "Arabic": "السماء " + "زرقاء لأن الضوء الأزرق يتشتت أكثر. " * 4,
    "code": "def f(n):\n" + "    if n == 0:\n        return 0\n" * 8,
    "white space behind": LIGHT * 5 + "\n\n   ",
}
DONE = {
    "nothing": "",
    "a sentence": LIGHT,
    "a loop that was left": LIGHT * 5 + "In short, what reaches the eye from all sides is blue.",
    "a refrain": "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, life is but a dream.",
    "a long refrain": (refrain := "Oh, the wind and the rain, the wind and the rain, " * 2)
    + "sang the old man at the door, who had seen many a winter come and go over the hills of his father's land. "
    + refrain,
    "an answer said twice": "The answer is 42. The answer is 42.",
    "tables of multiplication": "\n".join(f"7 x {i} = {7 * i}" for i in range(1, 40)),
    "a table": "| day | open | lunch |\n|---|---|---|\n"
    + "".join(f"| {d} | yes | yes |\n" for d in ["Mon", "Tue", "Wed", "Thu"]),
    "a ruler": "Results\n" + "=" * 300,
    "empty rows": "| name | age |\n" + "|      |     |\n" * 30,
    "digits": "One third is 0." + "3" * 400,
    "a matrix": "0 0 0 0 0 0 0 0 0 0\n" * 20,
    "hex": "static const char font[] = {" + "0x00, " * 60 + "};",
    "similar lines": "\n".join(f"assert add({i}, {i + 1}) == {2 * i + 1}, 'the sum is wrong'" for i in range(30)),
    "rows of JSON": "["
    + ", ".join(f'{{"id": {i}, "name": "chair", "colour": "red", "price": 12}}' for i in range(20))
    + "]",
    "closing tags": "<div>" * 12 + "x" + "</div>" * 12,
    "Chinese": "天空是蓝色的，因为光被散射了。海是蓝色的，因为它反射天空。",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    assert repeats_itself(LOOPS[name])


@pytest.mark.parametrize("name", DONE)
def test_no_loop(name: str) -> None:
    assert not repeats_itself(DONE[name])


def test_long_texts_that_nearly_loop() -> None:
    assert not repeats_itself("ab" * 5000 + "c" + "ab" * 50)
    assert repeats_itself("\ud800" + LIGHT * 5)  # half a character, as JSON may hold
