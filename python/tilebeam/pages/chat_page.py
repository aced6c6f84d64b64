"""The first page of a server: a conversation, whose questions are answered once or by a search over several answers."""

from __future__ import annotations

from tilebeam.pages.ask import AskOptions
from tilebeam.pages.document import document, policy
from tilebeam.pages.fields import EXTRACTORS, field, key_field, model_field, number_input, select
from tilebeam.pages.markup import Html, join, tag

_ANSWERS = (1, 4, 8, 16)
_RULES = policy("chat", more="connect-src 'self'")


def chat_page(options: AskOptions) -> str:
    """Write an HTML file, to be served with `chat_policy`."""
    brand = f"Tilebeam · {options.name}" if options.name else "Tilebeam"
    body = join(
        tag("header", tag("h1", brand, class_="brand"), tag("a", "Search", href="/search")),
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


def _conversation(options: AskOptions) -> Html:
    return tag(
        "main",
        tag("div", id="log", role="log", aria_live="off", aria_label="Conversation"),
        tag("p", id="wrong", class_="wrong", role="alert"),
        tag("p", id="news", class_="unseen", role="status"),
        tag(
            "form",
            key_field() if options.key else None,
            tag("label", "Message", for_="question", class_="unseen"),
            tag("textarea", id="question", rows=1, placeholder="Ask something. Shift+Enter begins a new line."),
            tag("div", _controls(options), class_="fields"),
            _settings(options),
            id="composer",
        ),
    )


def _controls(options: AskOptions) -> list[object]:
    budgets = {str(n): str(n) for n in _ANSWERS if n <= options.most}
    return [
        field("answers", "Answers", select("answers", budgets)),
        model_field(options.models, options.key),
        tag("button", "Send", type="submit", id="go", class_="first"),
        tag("button", "Stop", type="button", id="stop", hidden=True),
    ]


def _settings(options: AskOptions) -> Html:
    judges = {"": "a vote on the last number if the question has one, else the best text"}
    if "tir" in options.methods:
        judges["tir"] = "vote, programs run"
    judges |= {f"vote {e}": f"vote: an answer is {EXTRACTORS.get(e, e)}" for e in options.extractors}
    judges["best-of-n"] = "the best text"
    return tag(
        "details",
        tag("summary", "Settings"),
        field("system", "System prompt", tag("textarea", id="system", rows=2)),
        tag(
            "div",
            field("temperature", "Temperature", number_input("temperature", "", 0, 100, "any", "default")),
            field("max_tokens", "Tokens at most", number_input("max_tokens", "", 1, 1 << 20, 1, "default")),
            field("judge", "Of several answers", select("judge", judges)),
            class_="fields",
        ),
        id="settings",
    )
