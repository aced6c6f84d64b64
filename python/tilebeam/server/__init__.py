"""`tilebeam serve`: an HTTP server that speaks OpenAI's API, on FastAPI and uvicorn (the extra `server`).

Requests of all clients share the batches of one model:

    app           routes and middleware            -> service
    service       from a checked body to an answer -> host (the model), jobs (who is let in), searches, streams
    schema, grammar, chat, formats, errors         bodies in, JSON out
    security, metrics, settings, run               keys and limits, Prometheus, options, the process

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
