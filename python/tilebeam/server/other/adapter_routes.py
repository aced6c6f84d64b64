"""/lora-adapters in llama-server's form."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from tilebeam.server.models import Models
from tilebeam.server.requests import MOST_ADAPTERS, LoraScale


def add_adapter_routes(app: FastAPI, models: Models) -> None:
    """Serve this path."""

    @app.get("/lora-adapters")
    async def adapters(model: str | None = None) -> list[dict[str, Any]]:
        """Return the adapters, and their scales in requests that do not say."""
        return models.of(model).adapters.listed()

    @app.post("/lora-adapters")
    async def put_in_force(
        body: Annotated[list[LoraScale], Field(max_length=MOST_ADAPTERS)], model: str | None = None
    ) -> dict[str, bool]:
        """Set other scales for requests that do not say; an adapter that is not in the list gets 0."""
        models.of(model).adapters.put_in_force(body)
        return {"success": True}
