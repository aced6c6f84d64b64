"""Controls of forms, each with its label."""

from __future__ import annotations

from tilebeam.pages.markup import Html, tag

# What the server's extractors take as a candidate's answer.
EXTRACTORS = {
    "last-number": "its last number",
    "text": "all of it",
    "choice": "a letter, as of a choice",
    "boxed": "what stands in \\boxed{}",
}


def field(name: str, label: str, control: Html, hidden: bool = False) -> Html:
    """Make a control with its label."""
    return tag("div", tag("label", label, for_=name), control, class_="field", hidden=hidden)


def select(name: str, choices: dict[str, str]) -> Html:
    """Make a choice of values, each with what it is called."""
    return tag("select", [tag("option", label, value=value) for value, label in choices.items()], id=name)


def number_input(name: str, least: int, most: int, step: object) -> Html:
    """Make a field for a number; empty it stands for the default."""
    return tag("input", id=name, type="number", value="", min=least, max=most, step=step, placeholder="default")


def key_field() -> Html:
    """Make the field for an API key, which no page keeps."""
    key = tag("input", id="key", type="password", autocomplete="off", spellcheck="false")
    return field("key", "API key, kept until this page is closed", key)


def model_field(models: list[str], key: bool) -> Html | None:
    """Make a choice of models where there are several, or of those that a key will tell."""
    made = field("model", "Model", select("model", {m: m for m in models}), hidden=not models)
    return made if models or key else None
