"""`tilebeam serve`: an HTTP server that speaks the APIs of OpenAI and Anthropic, on FastAPI and uvicorn (extra
`server`).

Requests of all clients that ask for a model share its batches:

    app                        routes and middleware            -> models, and the modules with routes of their own
    models                     which models there are           -> service, model_host (what is loaded), metrics
    service                    from a checked body to an answer -> model_host, admission (who is let in), answering
    plan                       a request between body and answer; requests, grammar, errors: what bodies ask
    answering, search_answers  work with the model, and what comes of it as answer_events
    writing, event_stream      how answers are written and sent; the forms are in these two:
    openai/                    completions, chat_completions, responses
    other/                     messages (Anthropic's)
    reading_routes             embeddings, relevance, scores of given texts
    chat_forms                 chats in another form than chat_completions: responses, messages
    pages                      the page to ask on, and the pages of searches
    security, metrics, logs    keys and limits, Prometheus, a line for each request
    settings, main             options, the process
    served_model               what is loaded: the model and its reward model

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
