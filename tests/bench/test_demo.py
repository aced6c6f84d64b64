"""The demo: it runs on any instruct model; without one a toy runs instead; its hidden tests are right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tilebeam
from gguf_kit import with_metadata
from tilebeam.answers.code import question_of
from tilebeam.answers.example_forms import examples_of
from tilebeam.gguf import gguf_write as w

from bench.demo import __main__ as demo
from bench.demo.functions import FUNCTIONS, HIDDEN, REQUEST, passed
from bench.lib.synth import preset, write_model

RIGHT = {
    "roman": """def roman(n):
    out = ""
    for value, letters in ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
                           (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        out, n = out + letters * (n // value), n % value
    return out""",
    "rle": """def rle(text):
    from itertools import groupby
    return "".join(f"{len(list(run))}{c}" for c, run in groupby(text))""",
    "balanced": """def balanced(text):
    open, pairs = [], {")": "(", "]": "[", "}": "{"}
    for c in text:
        if c in "([{":
            open.append(c)
        elif c in pairs and (not open or open.pop() != pairs[c]):
            return False
    return not open""",
    "rpn": """def rpn(text):
    out = []
    for word in text.split():
        if word.isdigit():
            out.append(int(word))
        else:
            b, a = out.pop(), out.pop()
            out.append({"+": a + b, "-": a - b, "*": a * b}[word])
    return out[0]""",
    "caesar": """def caesar(text, shift):
    def moved(c):
        first = ord("A" if c.isupper() else "a")
        return chr((ord(c) - first + shift) % 26 + first) if c.isalpha() else c
    return "".join(map(moved, text))""",
}


def test_hidden_tests_take_what_is_right_and_nothing_else() -> None:
    for name, source in FUNCTIONS.items():
        answer = f"```python\n{RIGHT[name]}\n```"
        chosen = tilebeam.CompletionOutput(0, answer, [], "stop", 0)
        assert tilebeam.CodeExamples().score(REQUEST.format(source), [chosen]) == [1.0], name
        assert passed(name, answer) == "right", name
        assert passed(name, f"```python\ndef {name}(x):\n    return x\n```").startswith("wrong"), name
        question = question_of(source)
        assert question is not None
        shown = [test.source for test in examples_of(question.source, question.function)]
        assert len(shown) >= 2
        assert not [e for e in HIDDEN[name] if e.startswith(tuple(shown))]  # what chooses is not what judges


def test_the_demo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "base.gguf", preset("tiny", type="q8_0", n_layer=2))
    key, template = "tokenizer.chat_template", "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    model = with_metadata(base, tmp_path / "model.gguf", {key: w.kv_text(key, template)})
    monkeypatch.setattr(demo, "PAGE", tmp_path / "pages" / "votes.html")
    assert demo.main(["--model", str(model), "--quick", "-t", "1"]) in (0, 1)  # 1: no random text had a number
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "best of 8 by the examples",
        "│ roman │ wrong (0 of 4 tests)",
        "tilebeam vote --programs -m ",
        "│ Tilebeam │",
    ):
        assert part in shown
    assert "<html" in demo.PAGE.read_text(encoding="utf-8")


def test_without_the_model_a_toy_runs_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(demo, "fetched", full)
    assert demo.main(["--quick", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Without the instruct model: [Errno 28] No space left on device" in shown
    assert "| beam[prm] | run |" in shown
