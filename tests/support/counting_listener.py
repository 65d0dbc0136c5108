"""An HTTP endpoint on loopback that counts what reaches it, and answers each request as a judge."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CountingListener:
    """The endpoint, from construction to `close`."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        """Number of `connections`, and of bytes of request lines as `bytes_sent`."""
        self.tokens: list[str | None] = []
        """Authorization of each request, in order."""
        listener = self

        class Server(ThreadingHTTPServer):
            def get_request(self) -> Any:
                listener.seen["connections"] += 1
                return super().get_request()

            def handle_error(self, request: object, client_address: object) -> None: ...

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None: ...

            def parse_request(self) -> bool:
                listener.seen["bytes_sent"] += len(vars(self)["raw_requestline"])
                return super().parse_request()

            def do_POST(self) -> None:
                listener.tokens.append(self.headers.get("Authorization"))
                self.rfile.read(int(self.headers.get("content-length", 0)))
                message = {"role": "assistant", "content": "Score: 0.5"}
                body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
