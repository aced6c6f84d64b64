"""The page of a server to search on: a question, a method and a budget in, candidates and votes as they come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tilebeam.pages.document import document, policy
from tilebeam.pages.fields import EXTRACTORS, field, key_field, model_field, number_input, select
from tilebeam.pages.markup import Html, join, table, tag
from tilebeam.pages.methods import method_title
from tilebeam.search.search_defaults import MAX_STEPS


@dataclass(frozen=True)
class AskOptions:
    """What a server offers.

    Attributes:
        name: of the model, "" where only those with a key may know it.
        models: to choose from; none: there is one, or only those with a key may know them.
        key: whether requests need an API key.
        methods: that it can run, of those that `tilebeam.search.algorithms` knows.
        extractors: of answers.
        budget: candidates by default.
        most: candidates of a request.
    """

    name: str
    models: list[str]
    key: bool
    methods: Sequence[str]
    extractors: Sequence[str]
    budget: int
    most: int


def ask_page(options: AskOptions) -> str:
    """Write an HTML file, to be served with `ask_policy`."""
    brand = f"Tilebeam · {options.name}" if options.name else "Tilebeam"
    body = join(
        tag("header", tag("p", brand, " · ", tag("a", "Chat", href="/"), class_="brand"), tag("h1", "Ask")),
        tag("main", tag("noscript", tag("p", _NO_SCRIPT)), _form(options), _outcome()),
    )
    return document("Ask - Tilebeam", "ask", body, asdict(options), _RULES)


def ask_policy() -> str:
    """Write the Content-Security-Policy that the page is served with."""
    return f"{_RULES}; frame-ancestors 'none'"


# It talks to its own server only, and opens the page of a search, which inherits these rules.
_RULES = policy("ask", "search", more="connect-src 'self'")


_NO_SCRIPT = "This page needs JavaScript. Programs ask /v1/chat/completions."


def _form(options: AskOptions) -> Html:
    budget = min(options.budget, options.most)
    fields = [
        model_field(options.models, options.key),
        field("method", "Method", select("method", {m: method_title(m) for m in options.methods})),
        field("budget", "Candidates", number_input("budget", budget, 1, options.most)),
        field(
            "extract",
            "A candidate's answer is",
            select("extract", {e: EXTRACTORS.get(e, e) for e in options.extractors}),
            "vote adaptive",
        ),
        field("beam_width", "Beam width", number_input("beam_width", 4, 1, options.most), "beam dvts"),
        field("max_steps", "Steps at most", number_input("max_steps", MAX_STEPS, 1, 1000), "beam dvts"),
        field("max_tokens", "Tokens each, at most", number_input("max_tokens", 512, 1, 1 << 20)),
        field("temperature", "Temperature", number_input("temperature", 0.8, 0, 100, "any")),
        field("seed", "Seed", number_input("seed", "", 0, 2**31 - 1)),
    ]
    plain = tag("input", id="plain", type="checkbox")
    return tag(
        "form",
        field("question", "Question", tag("textarea", id="question", required=True)),
        tag("div", fields, class_="fields"),
        tag("p", tag("label", plain, " Continue this text as it is, without the chat template", class_="check")),
        key_field() if options.key else None,
        tag(
            "div",
            tag("button", "Search", type="submit", id="go", class_="first"),
            tag("button", "Stop", type="button", id="stop", disabled=True),
            class_="fields",
        ),
        id="ask",
    )


def _outcome() -> Html:
    """Leave room for what the script shows."""
    votes = [("Answer", ""), ("Candidates", "n"), ("Weight", "n"), ("", "bar"), ("Share", "n")]
    rounds = [("Round", "n"), ("Drawn", "n"), ("Kept", "n"), ("Dropped", "n"), ("Best score", "n")]
    candidates = [("#", "n"), ("Score", "n"), ("Tokens", "n wide"), ("End", "wide"), ("Text", "t")]
    return join(
        tag("p", id="wrong", class_="wrong", role="alert"),
        tag("p", id="news", class_="unseen", role="status"),
        tag(
            "div",
            tag("p", id="state", class_="note told"),
            tag(
                "section",
                tag("h2", "Answer"),
                tag("p", id="answer", class_="answer"),
                tag("pre", id="text", class_="text", tabindex=0),
                tag("p", id="why", class_="note"),
                tag(
                    "div",
                    tag("button", "Open the page of this search", type="button", id="open"),
                    tag("a", "Save it", id="save", hidden=True, download="search.html"),
                    class_="fields",
                ),
                id="chosen",
                class_="card",
                hidden=True,
            ),
            _live("votes", "Votes", votes, None),
            _live("rounds", "Rounds", rounds, "narrow"),
            _live("candidates", "Candidates", candidates, "candidates"),
            id="outcome",
            hidden=True,
        ),
    )


def _live(name: str, title: str, columns: list[tuple[str, str]], class_: str | None) -> Html:
    """Make a table that fills while the search runs."""
    shown = table(title, columns, [tag("tbody", id=f"{name}-rows")], class_=class_)
    return tag("section", tag("h2", title), shown, id=name, hidden=True)
