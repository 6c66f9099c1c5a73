"""A web server on this machine that breaks off in the middle, as networks do."""

import contextlib
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override


@dataclass
class Site:
    """What the server serves and how badly.

    Attributes:
        content: the file, at every path.
        breaks: how many more answers stop after half of their bytes.
        supports_ranges: whether Range requests are understood.
        tells_length: whether answers carry a Content-Length.
        hold: answers stop after half of their bytes until this is set.
        status: another answer than 200 for every request.
        ranges: the Range header of each request so far.
    """

    content: bytes
    breaks: int = 0
    supports_ranges: bool = True
    tells_length: bool = True
    hold: threading.Event | None = None
    status: int = 200
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(site: Site) -> Generator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, site)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the requests are recorded."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}/folder/corpus.jsonl"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(request: BaseHTTPRequestHandler, site: Site) -> None:
    asked = request.headers.get("Range")
    site.ranges.append(asked)
    if site.status != 200:
        request.send_error(site.status)
        return
    body, start = site.content, 0
    if asked and site.supports_ranges:
        match = re.fullmatch(r"bytes=(\d+)-", asked)
        assert match
        start = int(match[1])
        if start >= len(body):
            request.send_error(416)
            return
        body = body[start:]
        request.send_response(206)
        total = len(site.content)
        request.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
    else:
        request.send_response(200)
    if site.tells_length:
        request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if site.breaks > 0:
        site.breaks -= 1
        body = body[: len(body) // 2]
    sent = 0
    if site.hold and not site.hold.is_set():
        sent = len(body) // 2
        request.wfile.write(body[:sent])
        site.hold.wait()
    with contextlib.suppress(ConnectionError):  # a client that was killed meanwhile
        request.wfile.write(body[sent:])
    request.close_connection = True
