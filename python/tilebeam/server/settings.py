"""What a server is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilebeam.errors import TilebeamError
from tilebeam.sampling_params import SamplingParams

# What becomes of thoughts, as llama-server names it: "auto" is "deepseek", apart from the text.
ReasoningFormat = Literal["auto", "deepseek", "none"]


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        host, port: where to listen; port 0 lets the system choose.
        api_keys: of which a request must bring one; none: everybody may ask.
        max_waiting: samples that may wait for a slot; requests beyond are told to come again (429).
        max_samples: that one request may ask for: n or the budget, times its prompts.
        max_searches: that run at the same time; others wait.
        max_body: bytes of a request.
        programs: searches may run programs that the model writes, confined (the method tir, and "programs": true).
        sampling: temperature, top_k, top_p, min_p, repeat_penalty, thinking_budget and budget_message of requests that
            do not say.
        max_tokens: of chats that do not say; None: until the context is full.
        chat_template: a Jinja template, or the name of one of llama.cpp's; None: the model's own.
        chat_template_kwargs: variables of the template, for requests that do not set them.
        reasoning_format: of chats that do not say: "none" leaves thoughts in the text.
        cors_origins: web pages that may ask from a browser.
        shutdown_seconds: that running requests get to end.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_waiting: int = 256
    max_samples: int = 128
    max_searches: int = 8
    max_body: int = 1 << 20
    programs: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: ReasoningFormat = "auto"
    cors_origins: tuple[str, ...] = ()
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise TilebeamError("An API key must not be empty.")
        for name, least in (("max_waiting", 0), ("max_samples", 1), ("max_searches", 1), ("max_body", 1)):
            if getattr(self, name) < least:
                raise TilebeamError(f"{name} must be at least {least}, not {getattr(self, name)}.")
