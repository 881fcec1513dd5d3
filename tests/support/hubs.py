"""A stand-in for the hub of Hugging Face: a folder of data sets, served as the hub serves them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves ``folder/USER/SET/...``, and notes which files were asked for.

    Args:
        folder: the folder of users.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of an answer."""
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) == 2:
            author = query.get("author", [""])[0]
            names = sorted(path.name for path in (self.folder / author).iterdir())
            return self._json([{"id": f"{author}/{name}"} for name in names])
        if parts[:2] == ["api", "datasets"] and (self.folder / parts[2] / parts[3]).is_dir():
            name = f"{parts[2]}/{parts[3]}"
            files = sorted(p for p in (self.folder / name).rglob("*") if p.is_file())
            names = [file.relative_to(self.folder / name).as_posix() for file in files]
            if parts[4:5] == ["tree"]:
                facts = [{"size": file.stat().st_size, "oid": sha1(file.read_bytes()).hexdigest()} for file in files]
                return self._json([{"type": "file", "path": n, **f} for n, f in zip(names, facts, strict=True)])
            if parts[4:5] in ([], ["revision"]) and parts[5:] in ([], ["main"], [COMMIT], ["v3.0"]):
                return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]})
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            file = self.folder / parts[1] / parts[2] / "/".join(parts[5:])
            if file.is_file():
                self.asked.append("/".join(parts[5:]))
                tag = sha1(file.read_bytes()).hexdigest()
                return 200, file.read_bytes(), {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 404, b"", {"X-Error-Code": "RepoNotFound"}

    @staticmethod
    def _json(content: object) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


@contextmanager
def serving(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of a folder, which huggingface_hub asks in the place of its own."""
    constants: Any = pytest.importorskip("huggingface_hub.constants")
    downloads: Any = pytest.importorskip("huggingface_hub.file_download")
    template = "HUGGINGFACE_CO_URL_TEMPLATE"
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            status, body, headers = hub.answer(unquote(url.path), parse_qs(url.query))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    for module in (constants, downloads):  # earlier releases keep a copy
        monkeypatch.setattr(module, template, address + "/{repo_id}/resolve/{revision}/{filename}", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
