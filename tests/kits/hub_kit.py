"""A server that answers huggingface_hub as Hugging Face's hub does: repositories, files, ranges, refusals."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "c0ff"


class FakeHub:
    """Repositories with their files, and what was asked for.

    Attributes:
        files: contents by repository and name.
        refused: status and code of repositories that are not given away.
        cut: files of which the first answer breaks off in the middle.
        asked: method, path and range of each request.
    """

    def __init__(self, url: str, cache: Path) -> None:
        self.url, self.cache = url, cache
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.cut: set[str] = set()
        self.asked: list[tuple[str, str, str | None]] = []

    def downloads(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers["Range"]))
        api = path.startswith("/api/models/")
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        if repo in hub.refused or repo not in hub.files:
            status, code = hub.refused.get(repo, (401, "RepoNotFound"))
            self._send(status, b"{}", X_Error_Code=code, X_Error_Message=code)
        elif api:
            siblings = [{"rfilename": name} for name in hub.files[repo]]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._file(hub.files[repo][path.partition("/resolve/main/")[2]], path)

    do_HEAD = do_GET

    def _file(self, data: bytes, path: str) -> None:
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        facts = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
        if self.command == "GET" and path.rpartition("/")[2] in self.hub.cut:
            self.hub.cut.remove(path.rpartition("/")[2])
            self._send(200, data[: len(data) // 2], Content_Length=str(len(data)), **facts)
            self.close_connection = True
        elif start:
            facts["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], **facts)
        else:
            self._send(200, data, **facts)


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run one that this process's huggingface_hub asks, with a cache of its own."""
    handler = type("Handler", (_Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = handler.hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", cache)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
