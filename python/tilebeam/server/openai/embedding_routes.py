"""/v1/embeddings."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from tilebeam.outputs import Usage
from tilebeam.server.errors import bad_request
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.models import Models
from tilebeam.server.prompts import check_tokens
from tilebeam.server.requests import Strict, Text
from tilebeam.server.text_groups import MOST_TEXTS, check_length, read_groups
from tilebeam.server.writing import dumped_in_parts

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

# Elements of all vectors of one answer: as base64 they take 5 bytes each, as numbers about 20.
_MOST_ELEMENTS = {"base64": 1 << 23, "float": 1 << 22}


class EmbeddingRequest(Strict):
    """POST /v1/embeddings."""

    input: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    model: Text | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        if isinstance(self.input, str):
            return [self.input]
        tokens = [item for item in self.input if isinstance(item, int)]
        return [tokens] if tokens else [item for item in self.input if not isinstance(item, int)]


def add_embedding_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/v1/embeddings", response_model=None)
    @app.post("/embeddings", response_model=None, include_in_schema=False)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return texts as vectors of length 1."""
        service = models.of(body.model)

        def answer(loaded: LoadedModel, stopped: threading.Event) -> tuple[Response, int]:
            vectors, tokens = _embedded(loaded.lm, body, stopped)
            data = [
                {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
                for i, vector in enumerate(vectors)
            ]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            told = {"object": "list", "data": data, "model": service.name, "usage": usage}
            return Response(dumped_in_parts(told), media_type="application/json"), tokens

        response, tokens = await service.in_thread(request, answer)
        service.metrics.observe(Usage(prompt_tokens=tokens))
        return response


def _embedded(lm: LM, body: EmbeddingRequest, stopped: threading.Event) -> tuple[npt.NDArray[np.float32], int]:
    """Return the vectors, and how many tokens the texts have."""
    if lm.info.pooling == "rank" and not lm.info.generates:
        raise bad_request("This server's model ranks documents: /v1/rerank.", code="no_embeddings")
    if body.dimensions not in (None, lm.embedding_size):
        raise bad_request(
            f"dimensions: this model's embeddings have {lm.embedding_size} elements, no others can be asked for.",
            param="dimensions",
            code="invalid_value",
        )
    texts = body.texts
    most = _MOST_ELEMENTS[body.encoding_format]
    if len(texts) * lm.embedding_size > most:
        raise bad_request(
            f"input has {len(texts)} texts, each of which makes {lm.embedding_size} elements; an answer holds at most "
            f"{most} with encoding_format {body.encoding_format!r}: send fewer texts at once.",
            param="input",
            code="too_many_elements",
        )
    ids = [lm.tokenize(text, parse_special=False) if isinstance(text, str) else text for text in texts]
    for i, text in enumerate(ids):
        check_tokens(lm, text, f"input[{i}]")
        check_length(lm, text, f"input[{i}]", "input")
    parts = [lm.embed(group) for group in read_groups(ids, stopped)]
    return np.concatenate(parts), sum(map(len, ids))


def _encoded(vector: npt.NDArray[np.float32], how: str) -> Any:
    if how == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
