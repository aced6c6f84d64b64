"""`tilebeam serve`: an HTTP server that speaks the APIs of OpenAI, Anthropic and Ollama, on FastAPI and uvicorn (extra
`server`).

Requests of all clients that ask for a model share its batches:

    app                        routes and middleware            -> models, and the modules with routes of their own
    models                     which models there are           -> service, load_queue (how many are loaded), metrics
    service                    from a checked body to an answer -> model_host, admission (who is let in), answering
    plan                       a request between body and answer; requests, prompts, grammar, errors: what bodies ask
    answering, search_answers  work with the model, and what comes of it as answer_events
    writing, event_stream      how answers are written and sent; the forms are in these two:
    openai/                    completions, chat_completions, responses, embedding_routes
    other/                     messages (Anthropic's), ollama, infill, tokens, rerank, scores
    chat_forms                 chats in another form than chat_completions: responses, messages, ollama
    pages                      the page to ask on, and the pages of searches; other/api_page is /docs
    security, metrics, logs    keys and limits, Prometheus, a line for each request
    settings, main             options, the process
    served_model               what is loaded: the model and its reward model

Several processes behind one address (the extra `replicas`), in replicas/:

    ray_serve                  runs both on Ray Serve           -> ingress, replica
    ingress                    from a request to a replica      -> routing (which one)
    replica                    the application, with a model of its own

This module imports none of the packages of the extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install

_PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def check_packages() -> None:
    """Raise `TilebeamError` if a package of the extra is missing."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise TilebeamError(
            f"The server needs {', '.join(_PACKAGES.values())}; missing: {', '.join(missing)}. "
            f"Install them with: {how_to_install('server')}"
        )
