"""A stand-in for SGLang servers and PD routers: HTTP on loopback, in threads of the test process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def native(text: str, tokens: list[int], **meta: Any) -> dict[str, Any]:
    """A `/generate` answer."""
    meta = {"completion_tokens": len(tokens), "finish_reason": {"type": "stop"}} | meta
    return {"text": text, "output_ids": tokens, "meta_info": meta}


class Stub:
    """A server in a thread.

    Args:
        answer: makes the final `/generate` answer of a request; an answer with `status` is sent with that status, one
            with `cut` is streamed without its end.
        pages: JSON of GET paths; others are 404.
    """

    def __init__(self, answer: Answer, pages: dict[str, Any] | None = None) -> None:
        self.answer = answer
        self.pages = {} if pages is None else pages
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                page = stub.pages.get(self.path)
                self.send_json({"detail": "Not Found"} if page is None else page, 404 if page is None else 200)

            def do_POST(self) -> None:
                stub.serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def send_json(self, content: Any, status: int) -> None:
                encoded = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def send_events(self, events: list[str], pause: float) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for event in events:
                    self.wfile.write(f"data: {event}\n\n".encode())
                    self.wfile.flush()
                    time.sleep(pause)

        class Server(ThreadingHTTPServer):
            request_queue_size = 64
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that goes away is part of the tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, handler: Any, body: dict[str, Any]) -> None:
        with self.lock:
            self.bodies.append(body)
            self.paths.append(handler.path)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            found = self.answer(body)
        finally:
            with self.lock:
                self.at_once -= 1
        status = found.pop("status", 200)
        cut = found.pop("cut", False)
        if not body.get("stream") or status != 200:
            handler.send_json(found, status)
            return
        first = {"text": None, "output_ids": found.get("output_ids", [])[:1], "meta_info": {"finish_reason": None}}
        empty = {"text": "", "output_ids": [], "meta_info": {"completion_tokens": 0}}
        events = [json.dumps(event) for event in (empty, first, found)]
        handler.send_events(events[:2] if cut else [*events, "[DONE]"], 0.002)

    def __enter__(self) -> Stub:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)
