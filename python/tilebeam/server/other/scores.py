"""What the server's reward model says of given texts, step by step; and scores of pairs of texts, by a rerank model."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field, model_validator

from tilebeam.errors import NpuError, TilebeamError
from tilebeam.outputs import Usage
from tilebeam.prompt import Prompt
from tilebeam.scoring.own_reward import OwnReward
from tilebeam.scoring.reward_model import RatedText
from tilebeam.server.admission import ClientGone
from tilebeam.server.answer_events import Json
from tilebeam.server.errors import bad_request
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.models import Models
from tilebeam.server.other.rerank import ranked
from tilebeam.server.requests import Strict, Text
from tilebeam.server.service import Service

_MOST_TEXTS = 256  # of one request

OneOrMore = Text | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]


class ScoreRequest(Strict):
    """POST /v1/score: texts that answer one prompt; or pairs of texts, in vLLM's form."""

    prompt: Text | None = None
    texts: OneOrMore | None = None
    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    model: Text | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ScoreRequest:
        given = [getattr(self, name) is not None for name in ("prompt", "texts", "text_1", "text_2")]
        if given not in ([True, True, False, False], [False, False, True, True]):
            raise ValueError("takes prompt and texts, or text_1 and text_2")
        first, second = len(_listed(self.text_1)), len(_listed(self.text_2))
        if first != second and isinstance(self.text_1, list) and first != 1:
            raise ValueError("text_2: must be as many texts as text_1, which is one text or a list")
        return self

    @property
    def solutions(self) -> list[str]:
        """One or several."""
        return _listed(self.texts)

    @property
    def pairs(self) -> list[tuple[str, list[str]]]:
        """Texts, each with those that it is compared with; none in the other form."""
        first, second = _listed(self.text_1), _listed(self.text_2)
        return [(first[0], second)] if len(first) == 1 else [(a, [b]) for a, b in zip(first, second, strict=True)]


def _listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


def add_score_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Json:
        """Return scores of texts and of their steps, by the server's reward model; of pairs, by a rerank model."""
        service = models.of(body.model)
        if body.pairs:
            return await _of_pairs(service, body.pairs, request)
        rated = await service.in_thread(request, lambda loaded, stopped: _rated(loaded, body, stopped))
        usage = sum((r.usage for r in rated), Usage())
        service.metrics.observe(usage)
        data = [
            {"object": "score", "index": i, "score": r.score, "steps": r.steps, "scores": r.scores}
            for i, r in enumerate(rated)
        ]
        tokens = usage.full_scoring_tokens
        counts = {"prompt_tokens": tokens, "total_tokens": tokens, "scored_tokens": usage.scored_tokens}
        return {"object": "list", "data": data, "model": service.name, "usage": counts}


async def _of_pairs(service: Service, pairs: list[tuple[str, list[str]]], request: Request) -> Json:
    """Answer in vLLM's form; the scores are those of /v1/rerank."""
    scores, tokens = await service.in_thread(
        request, lambda loaded, stopped: ranked(loaded, pairs, stopped, ("text_1", "text_2"))
    )
    service.metrics.observe(Usage(prompt_tokens=tokens))
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": service.name,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _rated(loaded: LoadedModel, body: ScoreRequest, stopped: threading.Event) -> list[RatedText]:
    scorer = loaded.scorer
    if scorer is None:
        raise bad_request("This server has no reward model: start it with --prm or --orm.", code="no_reward_model")
    if isinstance(scorer, OwnReward):
        raise bad_request(
            "This server's reward head rates what its own model writes (search, scorer reward), not given texts: start "
            "it with --prm or --orm.",
            code="no_reward_model",
        )
    found, asked = [], Prompt(body.prompt or "", question=body.prompt)
    with scorer.session():
        for text in body.solutions:
            if stopped.is_set():
                raise ClientGone
            try:
                found.append(scorer.rate_text(asked, text))
            except NpuError:
                raise
            except TilebeamError as error:
                if loaded.failure is not None:
                    raise
                raise bad_request(f"texts: {error}", param="texts", code="invalid_value") from None
    return found
