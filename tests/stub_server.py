"""A server on this machine that answers as a test wishes, and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StubServer:
    """`answers` are given in turn, the last one again and again."""

    answers: list[Callable[[BaseHTTPRequestHandler], None]]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, in the order of their arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    most_at_once: int = 0
    num_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve_answers(*answers: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[StubServer]:
    """Serves until the block ends. Answers that hang get to know by `closing`."""
    stub = StubServer(list(answers))

    class StubRequest(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                number = len(stub.requests)
                stub.requests.append(body)
                stub.headers.append(dict(self.headers))
                stub.paths.append(self.path)
                stub.arrived_at.append(time.monotonic())
                stub.num_under_way += 1
                stub.most_at_once = max(stub.most_at_once, stub.num_under_way)
            try:
                stub.answers[min(number, len(stub.answers) - 1)](self)
            except OSError:
                self.close_connection = True
            finally:
                with stub.lock:
                    stub.num_under_way -= 1

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class StubListener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128
        stub_server = stub

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    listener = StubListener(("127.0.0.1", 0), StubRequest)
    stub.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stub.closing.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def send_body(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def say_text(text: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers as a chat completion with this content."""
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    return lambda request: send_body(request, 200, json.dumps(body).encode())


def refuse_with(status: int, body: str = "", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda request: send_body(request, status, body.encode(), **headers)


def send_raw(body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda request: send_body(request, 200, body)


def close_connection(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.close()


def break_off(request: BaseHTTPRequestHandler) -> None:
    """Promises more than it sends."""
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b'{"choices"')
    request.close_connection = True


def hang(request: BaseHTTPRequestHandler) -> None:
    request.server.stub_server.closing.wait(120)  # type: ignore[attr-defined]
    request.close_connection = True


def drip(request: BaseHTTPRequestHandler) -> None:
    """Sends a byte now and then, so that no single wait is long."""
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.end_headers()
    while not request.server.stub_server.closing.wait(0.02):  # type: ignore[attr-defined]
        request.wfile.write(b" ")
        request.wfile.flush()
