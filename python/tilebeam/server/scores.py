"""What the server's reward model says of given texts, step by step."""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field

from tilebeam.errors import NpuError, TilebeamError
from tilebeam.outputs import Usage
from tilebeam.scoring.own_reward import OwnReward
from tilebeam.scoring.reward_model import RatedText
from tilebeam.server.admission import ClientGone
from tilebeam.server.errors import bad_request
from tilebeam.server.model_host import Loaded
from tilebeam.server.models import Models
from tilebeam.server.requests import Strict, Text
from tilebeam.server.responses import Json

_MOST_TEXTS = 256  # of one request


class ScoreRequest(Strict):
    """POST /v1/score: texts that answer one prompt."""

    prompt: Text
    texts: Text | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]
    model: Text | None = None

    @property
    def solutions(self) -> list[str]:
        """One or several."""
        return [self.texts] if isinstance(self.texts, str) else self.texts


def add_score_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Json:
        """Scores of texts and of their steps, by the server's reward model."""
        service = models.of(body.model)
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


def _rated(loaded: Loaded, body: ScoreRequest, stopped: threading.Event) -> list[RatedText]:
    scorer = loaded.scorer
    if scorer is None:
        raise bad_request("This server has no reward model: start it with --prm or --orm.", code="no_reward_model")
    if isinstance(scorer, OwnReward):
        raise bad_request(
            "This server's reward head rates what its own model writes (search, scorer reward), not given texts: start "
            "it with --prm or --orm.",
            code="no_reward_model",
        )
    found = []
    with scorer.session():
        for text in body.solutions:
            if stopped.is_set():
                raise ClientGone
            try:
                found.append(scorer.rate_text(body.prompt, text))
            except NpuError:
                raise
            except TilebeamError as error:
                if loaded.failure is not None:
                    raise
                raise bad_request(f"texts: {error}", param="texts", code="invalid_value") from None
    return found
