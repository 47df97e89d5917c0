"""A hub on the loopback: serves one data set, or refuses as the real one does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: data/test-*\n---\n"


@contextlib.contextmanager
def serving(repo: str, *, parquet: bytes | None = None, refusal: tuple[int, str] | None = None) -> Iterator[str]:
    """The address of a hub that has ``repo``; with ``refusal`` (status, error code) it answers only that."""
    files = {"README.md": README, "data/test-00000-of-00001.parquet": parquet or b""}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            return

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            file = re.match(rf"/datasets/{repo}/resolve/[^/]+/(.*)", self.path)
            if refusal is not None:
                self.answer(refusal[0], X_Error_Code=refusal[1])
            elif file and file[1] in files:
                body = files[file[1]]
                self.answer(200, body, X_Repo_Commit=COMMIT, ETag=f'"{hashlib.sha1(body).hexdigest()}"')
            elif file:
                self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            elif self.path.startswith(f"/api/datasets/{repo}/tree"):
                tree = [{"type": "file", "oid": "0" * 40, "size": len(b), "path": p} for p, b in files.items()]
                tree.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": "data"})
                self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            elif self.path.startswith(f"/api/datasets/{repo}"):
                about = {"id": repo, "sha": COMMIT, "tags": [], "siblings": [{"rfilename": p} for p in files]}
                self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
            else:
                self.answer(404)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
