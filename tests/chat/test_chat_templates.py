"""Chat templates: the file's own is run, whatever it does, in a sandbox; built-in ones by name; errors say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from gguf_kit import with_metadata
from tilebeam import LM, TilebeamError
from tilebeam.chat.chat_template import MessagesRefused
from tilebeam.gguf import gguf_write as w

from bench.lib.synth import preset, write_model

HI: Any = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
# What no list of known templates holds: loops, filters, slices, a check of its own, a BOS token.
OWN = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set rest = messages[1:] %}{% else %}{% set system = 'none' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- if loop.first %}[{{ system }}] {% endif %}<{{ m.role | upper }}>{{ m.content }}</>
{%- endfor %}{% if add_generation_prompt %}<ASSISTANT>{% endif %}"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("templates") / "base.gguf", preset("tiny", n_layer=1))


def load(base: Path, template: str) -> LM:
    record = w.kv_text("tokenizer.chat_template", template)
    path = with_metadata(base, base.with_name("with.gguf"), {"tokenizer.chat_template": record})
    return tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, threads=1)


@pytest.fixture(scope="module")
def lm(base: Path) -> Iterator[LM]:
    with load(base, OWN) as model:
        yield model


def test_a_template_that_llama_cpp_does_not_know_is_run(lm: LM) -> None:
    assert lm.chat_prompt(HI).text == "[be brief] <USER>hi</><ASSISTANT>"
    ids = lm.chat_prompt(HI).ids
    assert ids == lm.tokenize(lm.chat_prompt(HI).text)
    assert ids.count(lm.bos) == (1 if lm.adds_bos else 0)  # the tokenizer adds it, the template's was taken off


def test_templates_given_by_text_and_by_name(lm: LM) -> None:
    text = "{% for m in messages %}{{ m.content }};{% endfor %}{{ eos_token }}"
    assert lm.chat_prompt(HI, template=text).text == " be brief ;hi;</s>"
    known = lm.chat_prompt(HI, template="chatml").text
    assert known.startswith("<|im_start|>system")
    assert known.endswith("<|im_start|>assistant\n")
    with pytest.raises(TilebeamError, match=r"'chatmal' is not a chat template.*chatml"):
        lm.chat_prompt(HI, template="chatmal")


def test_what_a_template_refuses(lm: LM) -> None:
    with pytest.raises(MessagesRefused, match="does not take these messages: Roles must alternate"):
        lm.chat_prompt([*HI, HI[1]])


def test_a_model_without_a_template(base: Path) -> None:
    with tilebeam.load(base, "cpu", n_ctx=256, n_seq_max=2, threads=1) as lm:
        with pytest.raises(TilebeamError, match="has no chat template"):
            lm.chat_prompt(HI)
        assert "hi" in lm.chat_prompt(HI, template=OWN).text
