"""Written numbers and letters of choices: tables of spellings, numbers that are printed in every style and read back,
and texts that nobody wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest
import tilebeam
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import boxed, choice, normalize_answer, regex
from tilebeam.answers import numbers
from tilebeam.answers.extract import Extractor, equality_of
from tilebeam.answers.extractors import extractor
from tilebeam.answers.normalize import faithful_math, plain_math

HERE = Path(__file__).parent


def lines(name: str) -> Iterator[list[str]]:
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield re.sub(r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), line).split(" | ")


SPELLINGS = [(spelling, value) for value, *spellings in lines("spellings.txt") for spelling in spellings]
TEXTS = [(name, " | ".join(text).replace("⏎", "\n"), answer) for name, answer, *text in lines("texts.txt")]


def in_texts(spelling: str) -> Iterator[tuple[str, Extractor, str]]:
    """A number where every extractor of numbers finds it."""
    yield "text", extractor("text"), spelling
    yield "boxed", boxed, rf"Then 7 of them are \boxed{{{spelling}}} of 12."
    yield "last-number", extractor("last-number"), f"Of 7 the result is {spelling} now"
    yield "gsm8k", extractor("gsm8k"), f"Of 7 it is\n#### {spelling}\nHope it helps, 24/7!"
    yield "regex", regex("<(.*)>"), f"1 <{spelling}> 2"


@pytest.mark.parametrize(("spelling", "value"), SPELLINGS)
def test_every_extractor_reads_the_spellings(spelling: str, value: str) -> None:
    assert normalize_answer(spelling) == normalize_answer(value) == value
    assert {name: extract(text) for name, extract, text in in_texts(spelling)} == dict.fromkeys(
        ("text", "boxed", "last-number", "gsm8k", "regex"), value
    )


def test_the_table_is_long_and_has_nothing_twice() -> None:
    assert len({spelling for spelling, _ in SPELLINGS}) == len(SPELLINGS) >= 300


@pytest.mark.parametrize(("name", "text", "answer"), TEXTS)
def test_answers_in_texts(name: str, text: str, answer: str) -> None:
    assert extractor(name)(text) == (None if answer == "none" else answer)


# --- printed and read back --------------------------------------------------------------------------------------------

THOUSANDS = st.sampled_from(["", ",", "{,}", r"\,", r"\;", r"\ ", r",\!", r"{,}\!", "'", "\u00a0", "\u2009", "\u202f"])
MINUS = st.sampled_from(["-", "−", "–", "- ", "− "])
CURRENCY = st.sampled_from(["", "$", r"\$", "€", "£"])
WHOLE = st.one_of(st.integers(0, 99), st.integers(1000, 10**15))


@st.composite
def integers(draw: st.DrawFn) -> tuple[str, Fraction]:
    value = draw(WHOLE)
    return f"{value:,}".replace(",", draw(THOUSANDS)), Fraction(value)


@st.composite
def decimals(draw: st.DrawFn) -> tuple[str, Fraction]:
    whole, value = draw(integers())
    digits = draw(st.text("0123456789", min_size=1, max_size=6))
    return f"{whole}.{digits}", value + Fraction(int(digits), 10 ** len(digits))


@st.composite
def powers(draw: st.DrawFn) -> tuple[str, Fraction]:
    size, value = draw(decimals())
    power = draw(st.integers(-9, 9))
    style = draw(st.sampled_from(["e{}", r" \times 10^{{{}}}", r"\cdot 10^{{{}}}", " × 10^{{{}}}"]))
    return size + style.format(power), value * Fraction(10) ** power


@st.composite
def fractions(draw: st.DrawFn) -> tuple[str, Fraction]:
    (top, a), (bottom, b) = draw(integers()), draw(integers().filter(lambda n: n[1] != 0))
    styles = [rf"\{kind}frac{{{top}}}{{{bottom}}}" for kind in ("", "d", "t", "c", "s", "nice")]
    styles += [f"{top}/{bottom}", f"{top} / {bottom}", f"{top}⁄{bottom}"]
    if a < 10 and b < 10:
        styles += [rf"\frac{top}{bottom}", rf"\dfrac {top} {bottom}", rf"\frac{{{top}}}{bottom}"]
    return draw(st.sampled_from(styles)), a / b


@st.composite
def mixed(draw: st.DrawFn) -> tuple[str, Fraction]:
    whole, value = draw(integers().filter(lambda n: n[1] != 0))
    bottom = draw(st.integers(2, 999))
    top = draw(st.integers(1, bottom - 1))
    gap = draw(st.sampled_from(["", " ", r"\,", r"\ ", "~"]))
    latex = draw(st.sampled_from([r"\frac", r"\dfrac", r"\tfrac"])) + f"{{{top}}}{{{bottom}}}"
    size = draw(st.sampled_from([whole + gap + latex, f"{whole} {top}/{bottom}"]))
    return size, value + Fraction(top, bottom)


@st.composite
def written(draw: st.DrawFn) -> tuple[str, Fraction]:
    """A number in some style, and its value."""
    size, value = draw(st.one_of(integers(), decimals(), powers(), fractions(), mixed()))
    currency, percent = draw(CURRENCY), draw(st.sampled_from(["", "", "%", r"\%", " %"]))
    if draw(st.booleans()):
        minus = draw(MINUS)
        size, value = draw(st.sampled_from([minus + currency + size, currency + minus + size])), -value
    else:
        size = currency + size
    return size + percent, value


@settings(deadline=None)
@given(written())
def test_numbers_in_every_style_are_read_back(number: tuple[str, Fraction]) -> None:
    spelling, value = number
    for name, extract, text in in_texts(spelling):
        answer = extract(text)
        assert answer is not None, name
        assert Fraction(answer) == value, name
        assert numbers.same_value(answer, str(value)), name
        assert answer == normalize_answer(answer) == plain_math(answer), "read again it is the same"


@pytest.fixture(scope="module")
def math_answer() -> Iterator[tilebeam.MathAnswer]:
    from tilebeam.answers import formulas as module

    yield tilebeam.MathAnswer()
    module._WORKER.close()


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify (the extra math)")
class TestWithMathVerify:
    """math-verify gives a number the value that it has."""

    def test_the_spellings(self, math_answer: tilebeam.MathAnswer) -> None:
        wrong = []
        for spelling, value in SPELLINGS:
            answer = math_answer(rf"it is \boxed{{{spelling}}}.")
            if answer is None or not math_answer.equal(answer, value) or math_answer.equal(answer, value + "7"):
                wrong.append((spelling, answer, value))
        assert wrong == []

    @settings(max_examples=60, deadline=None)
    @given(written().filter(lambda n: abs(n[1]) < 10**9))
    def test_every_style(self, math_answer: tilebeam.MathAnswer, number: tuple[str, Fraction]) -> None:
        spelling, value = number
        answer = math_answer(rf"\boxed{{{spelling}}}")
        assert answer is not None
        assert math_answer.equal(answer, str(value))
        assert faithful_math(answer) == answer

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            (r"\boxed{-2\frac{1}{2}}", r"-2\frac{1}{2}"),
            (r"\boxed{2 1/2}", r"2\frac{1}{2}"),
            (r"\boxed{10\tfrac24}", r"10\frac{2}{4}"),
            (r"\boxed{\frac{1}{2}3}", r"\frac{1}{2}3"),
            (r"\boxed{x = 2½}", r"x = 2\frac{1}{2}"),
            (r"\boxed{10\,000x}", "10000x"),
            (r"\boxed{\text{even}}", r"\text{even}"),
            (r"\boxed{50\%}", r"50\%"),
            (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
            (r"it is $2\frac{1}{2}$", r"2\frac{1}{2}"),
            ("it is 2 1/2", r"2\frac{1}{2}"),
            ("it is 10{,}000", "10000"),
            ("it is −5", "-5"),
        ],
    )
    def test_it_decides_what_a_formula_means(self, math_answer: tilebeam.MathAnswer, text: str, answer: str) -> None:
        assert math_answer(text) == answer

    @pytest.mark.parametrize(
        ("a", "b", "same"),
        [
            (r"\boxed{2\frac{1}{2}}", r"\boxed{2.5}", True),
            (r"\boxed{2\frac{1}{2}}", r"\boxed{\frac{21}{2}}", False),
            (r"\boxed{\frac{1}{2}3}", r"\boxed{3/2}", True),
            (r"\boxed{\frac{1}{2}3}", r"\boxed{\frac{1}{23}}", False),
            (r"\boxed{50\%}", r"\boxed{0.5}", True),
            (r"\boxed{50\%}", r"\boxed{50}", True),
            (r"\boxed{\text{east}}", r"\boxed{\text{seat}}", False),
            (r"\boxed{\text{east}}", r"\boxed{east}", True),
            # each has the product of the other's numbers
            (r"\boxed{\begin{pmatrix} 2 \\ 6 \end{pmatrix}}", r"\boxed{\begin{pmatrix} 3 \\ 4 \end{pmatrix}}", False),
            (r"\boxed{\begin{pmatrix} 2 \\ 6 \end{pmatrix}}", r"\boxed{\begin{pmatrix} 2\\6 \end{pmatrix}}", True),
        ],
    )
    def test_equality_is_that_of_the_boxes(self, math_answer: tilebeam.MathAnswer, a: str, b: str, same: bool) -> None:
        one, other = math_answer(a), math_answer(b)
        assert one is not None
        assert other is not None
        assert math_answer.equal(one, other) is same


# --- values -----------------------------------------------------------------------------------------------------------


@given(st.fractions(), st.fractions(), st.integers(-(10**12), 10**12))
def test_numbers_are_equal_by_value(a: Fraction, b: Fraction, eighths: int) -> None:
    assert numbers.same_value(str(a), str(b)) == (a == b)
    assert numbers.same_value(format(Decimal(eighths) / 8, "f"), str(Fraction(eighths, 8)))


def test_other_texts_are_equal_if_they_are_the_same() -> None:
    for name in ("last-number", "gsm8k", "boxed", "text", r"= (.*)"):
        equal = equality_of(extractor(name))
        assert equal("0.5", "1/2")
        assert equal("x", "x")
        assert not equal("x", "y")
        assert not equal("1/0", "2/0")
        assert not equal("1/3", "0.333")
    assert not equality_of(lambda text: text)("0.5", "1/2")  # a user's own: equal strings


# --- texts that nobody wrote ------------------------------------------------------------------------------------------

PIECES = (
    r"\ { } $ \$ % \% , . - − + / = ( ) [ ] \( \) 1 2 0 12 000 \frac \dfrac \boxed{ \boxed \text{ \left \right. #### "
    r"answer is A B \, ~ ½ e3 \times 10^ x and ⁄ \\"
)
some = st.lists(st.sampled_from(PIECES.split()), max_size=30)
ANY_TEXT = st.one_of(st.text(), some.map("".join), some.map(" ".join))
NAMES = ("last-number", "gsm8k", "boxed", "choice", "text")


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT)
def test_no_text_is_too_odd(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once
    number = numbers.last_number(text)
    assert number is None or numbers.last_number(number) == number == normalize_answer(number)
    for name in NAMES:
        answer = extractor(name)(text)
        assert answer is None or answer.strip() == answer != ""
    for latex in (plain_math(text), faithful_math(text)):
        assert latex == latex.strip()
        assert "$" not in latex
    assert numbers.last_side(text) in text
    assert choice()(text) in (None, *"ABCDE")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1 ",
        "1,111,",
        "-$ ",
        r"\frac{1",
        r"\boxed{",
        r"\boxed ",
        r"\text{ ",
        "#### 1 + ",
        "1 1/2/",
        "answer ",
        "A, ",
    ],
)
def test_time_is_linear_in_the_text(piece: str) -> None:
    """Quadratic time would be minutes."""
    text = piece * (100_000 // len(piece))
    for name in NAMES:
        extractor(name)(text)
        extractor(name)(rf"\boxed{{5\text{{{text}!}}}}")
    faithful_math(text)


@pytest.mark.timeout(60)
def test_an_answer_of_a_megabyte() -> None:
    text = "Then 3 + 4 = 7, so $x = \\frac{1}{2}$.\n" * 27_000 + "#### 1{,}000\nThe answer is (B)."
    found = {name: extractor(name)(text) for name in NAMES if name != "text"}
    assert found == {"last-number": "1000", "gsm8k": "1000", "boxed": None, "choice": "B"}
    digits = "9" * 1_000_000
    assert extractor("last-number")(f"{digits}/{digits}") == digits
