"""A real S3-speaking server on loopback for tests (moto's), and a TCP proxy before it that cuts connections."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import requests


@contextlib.contextmanager
def serve_s3(monkeypatch) -> Iterator[str]:
    """Start the server, point the AWS environment at it, and yield its endpoint."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    requests.post(f"http://{host}:{port}/moto-api/reset", timeout=30).raise_for_status()  # its state is the process's
    use_endpoint(monkeypatch, f"http://{host}:{port}")
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use_endpoint(monkeypatch, endpoint: str) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    clear_instances()


def clear_instances() -> None:
    """fsspec keeps connected file systems; a changed endpoint needs new ones."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


@dataclass
class Proxy:
    """Forwards to the server; `cut_up` / `cut_down`: after so many bytes of one connection to / from it, cut it, once."""

    port: int = 0
    cut_up: int = 0
    cut_down: int = 0
    cuts: int = 0
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str, seen: int) -> bool:
        with self._lock:
            bound = getattr(self, name)
            if not bound or seen < bound:
                return False
            setattr(self, name, 0)
            self.cuts += 1
            return True


@contextlib.contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    target = (endpoint.rpartition("/")[2].partition(":")[0], int(endpoint.rpartition(":")[2]))
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listener.getsockname()[1])

    def pump(source: socket.socket, sink: socket.socket, name: str) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                seen += len(data)
                if proxy.take(name, seen):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = listener.accept()
                if proxy.closed:
                    ours.close()
                    continue
                theirs = socket.create_connection(target)
                threading.Thread(target=pump, args=(ours, theirs, "cut_up"), daemon=True).start()
                threading.Thread(target=pump, args=(theirs, ours, "cut_down"), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.close()
