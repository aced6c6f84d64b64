"""The first page of a server: a conversation, whose questions are answered once or by a search over several answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam.pages.document import document, policy
from tilebeam.pages.markup import Html, join, tag
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
    brand = f"Tilebeam · {options.name}" if options.name else "Tilebeam"
    body = join(
        tag("header", tag("h1", brand, class_="brand")),
        tag("noscript", tag("p", "This page needs JavaScript. Programs ask /v1/chat/completions.")),
        tag("div", _history(), _conversation(options), class_="chat"),
    )
    return document("Tilebeam", "chat", body, {}, _RULES)


def chat_policy() -> str:
    """Write the Content-Security-Policy that the page is served with."""
    return f"{_RULES}; frame-ancestors 'none'"


def _history() -> Html:
    return tag(
        "details",
        tag("summary", "Conversations"),
        tag(
            "div",
            tag("button", "New", type="button", id="new"),
            tag("button", "Export", type="button", id="export", title="Save this conversation as a JSON file"),
            class_="fields",
        ),
        tag("ul", id="list"),
        tag("p", "They are kept in this browser only.", class_="note"),
        id="history",
    )


def _conversation(options: PageOptions) -> Html:
    return tag(
        "main",
        tag("div", id="log", role="log", aria_live="off", aria_label="Conversation"),
        tag("p", id="wrong", class_="wrong", role="alert"),
        tag("p", id="news", class_="unseen", role="status"),
        tag(
            "form",
            _key() if options.key else None,
            tag("label", "Message", for_="question", class_="unseen"),
            tag("textarea", id="question", rows=1, placeholder="Ask something. Shift+Enter begins a new line."),
            tag("div", _controls(options), class_="fields"),
            _settings(options),
            id="composer",
        ),
    )


def _controls(options: PageOptions) -> list[object]:
    budgets = {str(n): str(n) for n in _ANSWERS if n <= options.most}
    model = _field("model", "Model", _select("model", {m: m for m in options.models}), hidden=not options.models)
    return [
        _field("answers", "Answers", _select("answers", budgets)),
        model if options.models or options.key else None,  # those that a key will tell are filled in later
        tag("button", "Send", type="submit", id="go", class_="first"),
        tag("button", "Stop", type="button", id="stop", hidden=True),
    ]


def _settings(options: PageOptions) -> Html:
    judges = {"": "a vote on the last number if the question has one, else the best text"}
    judges |= {method: method_title(method) for method in options.methods}
    judges |= {f"vote {e}": f"vote: an answer is {_EXTRACTORS.get(e, e)}" for e in options.extractors}
    judges["best-of-n"] = "the best text"
    return tag(
        "details",
        tag("summary", "Settings"),
        _field("system", "System prompt", tag("textarea", id="system", rows=2)),
        tag(
            "div",
            _field("temperature", "Temperature", _number("temperature", 0, 100, "any")),
            _field("max_tokens", "Tokens at most", _number("max_tokens", 1, 1 << 20, 1)),
            _field("judge", "Of several answers", _select("judge", judges)),
            class_="fields",
        ),
        id="settings",
    )


def _field(name: str, label: str, control: Html, hidden: bool = False) -> Html:
    """Make a control with its label."""
    return tag("div", tag("label", label, for_=name), control, class_="field", hidden=hidden)


def _key() -> Html:
    """Make the field for an API key, which no page keeps."""
    key = tag("input", id="key", type="password", autocomplete="off", spellcheck="false")
    return _field("key", "API key, kept until this page is closed", key)


def _select(name: str, choices: dict[str, str]) -> Html:
    """Make a choice of values, each with what it is called."""
    return tag("select", [tag("option", label, value=value) for value, label in choices.items()], id=name)


def _number(name: str, least: int, most: int, step: object) -> Html:
    """Make a field for a number; empty it stands for the default."""
    return tag("input", id=name, type="number", value="", min=least, max=most, step=step, placeholder="default")
