"""The few answers of the Hugging Face hub that streaming one data set needs, on this machine."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override

NAME = "owner/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "train.jsonl"


@contextmanager
def hub(content: bytes) -> Generator[tuple[str, list[str]]]:
    """Serves ``owner/name`` with one file; gives the endpoint and the paths asked for so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = _answer(self.path.partition("?")[0], content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{"1" * 40}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                known = "EntryNotFound" if COMMIT in self.path else "RevisionNotFound"
                self.send_header("X-Error-Code", known)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the requests are recorded."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(path: str, content: bytes) -> tuple[int, bytes]:
    info = {"id": NAME, "sha": COMMIT, "private": False, "downloads": 0, "likes": 0}
    entry = {"type": "file", "path": FILE, "size": len(content), "oid": "1" * 40}
    answers = {
        f"/api/datasets/{NAME}/revision/{COMMIT}": info | {"siblings": [{"rfilename": FILE}]},
        f"/api/datasets/{NAME}/tree/{COMMIT}": [entry],
    }
    if path in answers:
        return 200, json.dumps(answers[path]).encode()
    if path == f"/datasets/{NAME}/resolve/{COMMIT}/{FILE}":
        return 200, content
    return 404, b""
