"""What type checkers say of a program that uses the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from tilebeam import LM, SamplingParams
from tilebeam.model.chatting import ChatFields
from tilebeam.sampling_params import SamplingFields

PROGRAM = Path(__file__).with_name("typed_program.py")
ROOT = PROGRAM.parents[2]


def test_fields_by_name_are_those_of_sampling_params() -> None:
    fields = get_type_hints(SamplingParams)
    assert get_type_hints(SamplingFields) == fields
    options = get_type_hints(LM.prepare_chat)
    known = get_type_hints(ChatFields)
    assert known.keys() - fields.keys() == options.keys() - {"messages", "sampling", "fields", "return"}
    assert {name: options[name] for name in known if name in options} == {
        name: hint for name, hint in known.items() if name in options
    }


def test_mypy_accepts_what_is_right_and_names_what_is_not(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    lines = (
        'lm.generate("x", max_token=3)',
        "lm.chat([], temprature=0)",
        'lm.stream("x", seed="1")',
    )
    begin = "import tilebeam\n\ndef f(lm: tilebeam.LM) -> None:\n"
    wrong.write_text(begin + "".join(f"    {line}\n" for line in lines))
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, str(PROGRAM), str(wrong)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in said.stdout.splitlines() if " error: " in line]
    assert {line.split(":")[1] for line in errors} == {"4", "5", "6"}, said.stdout
    assert all(line.startswith(str(wrong)) for line in errors), said.stdout
