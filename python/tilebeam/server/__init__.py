"""`tilebeam serve`: an HTTP server that speaks OpenAI's API, on FastAPI and uvicorn (the extra `server`).

Requests of all clients that ask for a model share its batches:

    app              routes and middleware            -> models, and the modules with routes of their own
    models           which models there are           -> service, places (how many are loaded), metrics
    service          from a checked body to an answer -> model_host, admission (who is let in), searches, streams
    requests, prompts, chat, tools, grammar, errors   bodies in: fields, prompts, functions, what the text must be
    responses, echo, tool_calls, tool_style           JSON out: choices, scored prompts, calls read out of texts
    response_requests, response_answers               /v1/responses, which is a chat in another form
    tokens, embeddings, scores, pages, adapter_routes routes of their own
    security, metrics, settings, main                 keys and limits, Prometheus, options, the process
    served_model                                      what is loaded: the model and its reward model

Several processes behind one address (the extra `replicas`):

    ray_serve        runs both on Ray Serve           -> ingress, replica
    ingress          from a request to a replica      -> placement (which one)
    replica          the application, with a model of its own

This module imports none of the packages of the extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from tilebeam.errors import TilebeamError

_PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def check_packages() -> None:
    """Raise `TilebeamError` if a package of the extra is missing."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise TilebeamError(
            f"The server needs {', '.join(_PACKAGES.values())}; missing: {', '.join(missing)}. "
            "Install them with: pip install 'tilebeam[server]'"
        )
