"""A package index on loopback for the tests of fetching: serves the simple API for files given as bytes."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class PackageIndex:
    """`files`: name -> bytes, of project `name.partition("-")[0]`. `fail_next` answers that many requests with 503."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail_next = 0
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes]:
        self.requests.append(path)
        if self.fail_next:
            self.fail_next -= 1
            return 503, b"busy"
        if path.startswith("/simple/"):
            project = path.removeprefix("/simple/").strip("/")
            names = [n for n in self.files if n.rpartition("-")[0].replace("_", "-").lower() == project]
            links = "".join(f'<a href="/files/{n}#sha256={digest(self.files[n])}">{n}</a>' for n in names)
            return (200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode()) if names else (404, b"")
        name = path.rpartition("/")[2]
        return (200, self.files[name]) if name in self.files else (404, b"")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def serve() -> Iterator[PackageIndex]:
    index = PackageIndex()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802 - the base class's name
            status, body = index.answer(self.path)
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html" if self.path.startswith("/simple") else "application/octet-stream"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple/"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
