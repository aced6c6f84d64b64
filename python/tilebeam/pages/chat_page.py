"""The first page of a server: a conversation, whose questions are answered once or by a search over several answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam.pages.document import document, filled, policy
from tilebeam.pages.markup import Html, tag
from tilebeam.pages.methods import method_title

_ANSWERS = (1, 4, 8, 16, 32, 64)
# What the server's extractors take as a candidate's answer.
_EXTRACTORS = {
    "last-number": "its last number",
    "text": "all of it",
    "choice": "a letter, as of a choice",
    "boxed": "what stands in \\boxed{}",
}
# It talks to its own server only, and opens the page of a search, which inherits these rules.
_RULES = policy("chat", "search", more="connect-src 'self'")


@dataclass(frozen=True)
class PageOptions:
    """What a server offers.

    Attributes:
        name: of the model, "" where only those with a key may know it.
        models: to choose from; none: there is one, or only those with a key may know them.
        key: whether requests need an API key.
        methods: of search that it can run besides a vote and the best of several.
        extractors: of answers.
        most: candidates of a request.
    """

    name: str
    models: list[str]
    key: bool
    methods: Sequence[str]
    extractors: Sequence[str]
    most: int


def chat_page(options: PageOptions) -> str:
    """Write an HTML file, to be served with `chat_policy`."""
    judges = {"": "a vote on the last number if the question has one, else the best text"}
    judges |= {method: method_title(method) for method in options.methods}
    judges |= {f"vote {e}": f"vote: an answer is {_EXTRACTORS.get(e, e)}" for e in options.extractors}
    judges["best-of-n"] = "the best text"
    budgets = {str(n): str(n) for n in _ANSWERS if n <= options.most}
    # No page keeps a key; models that a key will tell are filled in later.
    key = tag("input", id="key", type="password", autocomplete="off", spellcheck="false")
    models = _select("model", "Model", {m: m for m in options.models}, hidden=not options.models)
    body = filled(
        "parts/chat.html",
        brand=f"Tilebeam · {options.name}" if options.name else "Tilebeam",
        key=_field("key", "API key, kept until this page is closed", key) if options.key else "",
        answers=_select("answers", "Answers", budgets),
        model=models if options.models or options.key else "",
        temperature=_number("temperature", "Temperature", 0, 100, "any"),
        max_tokens=_number("max_tokens", "Tokens at most", 1, 1 << 20, 1),
        judge=_select("judge", "Of several answers", judges),
    )
    return document("Tilebeam", "chat", Html(body.replace("\n", "")), {}, _RULES)


def chat_policy() -> str:
    """Write the Content-Security-Policy that the page is served with."""
    return f"{_RULES}; frame-ancestors 'none'"


def _field(name: str, label: str, control: Html, hidden: bool = False) -> Html:
    """Make a control with its label."""
    return tag("div", tag("label", label, for_=name), control, class_="field", hidden=hidden)


def _select(name: str, label: str, choices: dict[str, str], hidden: bool = False) -> Html:
    """Make a choice of values, each with what it is called."""
    control = tag("select", [tag("option", said, value=value) for value, said in choices.items()], id=name)
    return _field(name, label, control, hidden)


def _number(name: str, label: str, least: int, most: int, step: object) -> Html:
    """Make a field for a number; empty it stands for the default."""
    about = {"value": "", "min": least, "max": most, "step": step, "placeholder": "default"}
    return _field(name, label, tag("input", id=name, type="number", **about))
