"""Chat templates that mean harm: whatever they do, there is a sentence within their time, and others are served."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tilebeam import TilebeamError
from tilebeam.chat import chat_template, rendering
from tilebeam.chat.chat_template import ChatTemplates, MessagesRefused, check_template
from tilebeam.chat.template_worker import reply_to

HI: Any = [{"role": "user", "content": "hi"}]
SOUND = "{% for m in messages %}{{ m.content }};{% endfor %}"
ENDLESS = (
    "{% set n = range(99999) %}{% for a in n %}{% for b in n %}{% for c in n %}{% endfor %}{% endfor %}{% endfor %}"
)
VOCAB: Any = SimpleNamespace(bos=1, eos=2, adds_bos=True, spelling=lambda token: ("", "<s>", "</s>")[token])


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates have a fifth of a second."""
    for module in (rendering, chat_template):
        monkeypatch.setattr(module, "SECONDS", 0.2)
    monkeypatch.setattr(rendering, "_PATIENCE", 300)  # a machine may be that busy
    yield
    rendering._STOPPED.clear()


def text(template: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplates(VOCAB, None, "m.gguf").apply(messages, template, (), variables)


SUM = "{{% set n = namespace(s={}) %}}{{% for i in range(5000) %}}"
NO_END, MEMORY, DEEP = "does not come to an end within", "needs more than 512 MiB", "nested too deeply"
HARM = {
    "loops": (ENDLESS, NO_END),
    "one operation": ("{{ 9 ** (9 ** 9) }}", NO_END),
    "words": ("{{ lipsum(n=100000) }}", NO_END),
    "sorting": ("{% for i in range(99999) %}{% set x = range(99999)|sort(reverse=i % 2)|list %}{% endfor %}", NO_END),
    "replacing": ("{% set n = namespace(s='a' * 10000) %}{{ n.s|replace('', n.s)|replace('a', n.s)|length }}", MEMORY),
    "format": ("{{ '%1000000000s' % 'a' }}", MEMORY),
    "centre": ("{{ 'a'|center(100000000000) }}", MEMORY),
    "product": ("{{ 'x' * 10**11 }}", MEMORY),
    "doubling": (f"{SUM.format('2 * 9')}{{% set n.s = n.s ~ n.s %}}{{% endfor %}}", f"{MEMORY}|{NO_END}"),
    "lists": (f"{SUM.format('[1]')}{{% set n.s = n.s + n.s %}}{{% endfor %}}", f"{MEMORY}|{NO_END}"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "makes more than .* characters"),
    "one output": ("{{ '%9000000s' % 'a' }}", "makes more than .* characters"),
    "parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", DEEP),
    "conditions": ("{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000, DEEP),
    "macro": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", DEEP),
    "JSON": (f"{SUM.format('[]')}{{% set n.s = [n.s] %}}{{% endfor %}}{{{{ n.s|tojson }}}}", DEEP),
    "loop 20 deep": ("{% for a in messages %}" * 21 + "{% endfor %}" * 21, "SyntaxError"),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "digits": ("{{ 10 ** 9999 }}", "ValueError"),
    "size": ("{{ 1 }}" + " " * (1 << 20), "is longer than"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_harmful_template_is_a_sentence_and_the_next_one_is_run(name: str) -> None:
    template, why = HARM[name]
    own = ChatTemplates(VOCAB, template, "harm.gguf")
    with pytest.raises(TilebeamError, match=rf"^The chat template of harm\.gguf .*({why}).* chatml"):
        own.apply(HI, None)
    assert text(SOUND) == "hi;"


def test_templates_do_what_they_did_within_this_process() -> None:
    """Variables, filters and statements that models' files use."""
    assert text("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}|{{ tools is none }}") == "</s>True|True"
    assert text("{{ x|tojson(indent=1) }}{{ enable_thinking }}", x={"ä": ["<"]}) == '{\n "ä": [\n  "<"\n ]\n}True'
    assert text("{% generation %}a{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}  \n") == "a  "
    assert text("{{ strftime_now('%Y')|length }}{{ functions is none }}") == "4True"
    assert text(SOUND, [{"content": "\ud800 \U0001f600"}]) == "\ud800 \U0001f600;"
    with pytest.raises(MessagesRefused, match="does not take these messages: no user"):
        text("{{ raise_exception('no user') }}")
    with pytest.raises(MessagesRefused, match="must be JSON: set is no type of JSON"):
        text(SOUND, [{"content": {1}}])
    with pytest.raises(TilebeamError, match=r"not valid Jinja \(line 1"):
        check_template("{% for %}", {})
    with pytest.raises(TilebeamError, match=NO_END):
        check_template("{{ 9 ** (9 ** 9) }}", {})  # Jinja computes what is constant when it reads a template
    check_template(ENDLESS, {})  # and runs nothing


def test_a_template_that_was_stopped_holds_up_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is one that ends only without a message."""
    template = ENDLESS.replace("in n", "in n if messages")
    with pytest.raises(TilebeamError, match=NO_END):
        text(template)
    rendering._SLOW._process.greeting()  # it is there: one that is killed while it starts is another matter
    entered = threading.Event()
    ask = rendering._SLOW.ask

    def noted(request: bytes) -> Any:
        entered.set()
        return ask(request)

    monkeypatch.setattr(rendering._SLOW, "ask", noted)
    monkeypatch.setattr(rendering, "SECONDS", 600)
    with ThreadPoolExecutor() as pool:
        stuck = pool.submit(text, template)
        assert entered.wait(60)
        monkeypatch.setattr(rendering, "SECONDS", 0.01)
        with pytest.raises(TilebeamError, match=NO_END):  # nobody waits behind it for longer than a template may take
            text(template, [])
        monkeypatch.setattr(rendering, "SECONDS", 60)
        assert text(SOUND) == "hi;"
        assert not stuck.done()
        process = rendering._SLOW._process.process
        assert process is not None
        process.kill()
        with pytest.raises(TilebeamError, match=NO_END):
            stuck.result(60)
    assert text(template, []) == ""  # it runs among the others again
    assert not rendering._STOPPED


def test_many_at_once() -> None:
    with ThreadPoolExecutor(12) as pool:
        bad = [pool.submit(text, ENDLESS) for _ in range(6)]
        good = [pool.submit(text, SOUND, [{"content": str(i)}]) for i in range(50)]
        assert [one.result(60) for one in good] == [f"{i};" for i in range(50)]
        for one in bad:
            with pytest.raises(TilebeamError, match=NO_END):
                one.result(60)


def test_the_process_is_confined_and_replaced() -> None:
    assert text(SOUND) == "hi;"
    process = rendering._USUAL._process.process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert {v.split(b"=")[0] for v in variables} <= {b"PATH", b"LD_LIBRARY_PATH", b"TZ", b"PYTHONPATH", b""}
    process.kill()
    process.wait()
    assert text(SOUND) == "hi;"
    child = os.fork()
    if child == 0:  # it has a process of its own
        os._exit(text(SOUND) != "hi;")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert text(SOUND) == "hi;"


@pytest.mark.parametrize("template", ["{{ a['b'] }}", "{{ '{0.__class__.__base__}'.format(1) }}", "{{ [].append(1) }}"])
def test_what_jinja_refuses(template: str) -> None:
    assert "Error" in reply_to(template, {}, 99)["failed"]
