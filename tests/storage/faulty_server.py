"""Faults between a client and a server: a WSGI layer that loses, cuts, delays, doubles and refuses.

It lies round any WSGI application, in the test's own process, so a test says which request is
struck, and sees every request that came. Changes are carried out one at a time.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from werkzeug.serving import WSGIRequestHandler, make_server

Effect = Literal[
    "lose", "cut", "late", "delay", "repeat", "busy", "broken", "broken_after", "conflict", "deny",
    "flip",
]  # fmt: skip
"""
| effect | what happens to the request |
|---|---|
| lose | it is carried out; the connection ends without an answer |
| cut | half of its body, or of the answer to a read, comes through; then the connection ends |
| late | the connection ends without an answer; it is carried out `seconds` later |
| delay | it is carried out `seconds` later, and answered |
| repeat | it is carried out twice, and answered with the second answer |
| busy, broken | it is answered 503, or 500, and not carried out |
| broken_after | it is carried out, and answered 500 |
| conflict, deny | it is answered 409, or 403, and not carried out |
| flip | one bit of the answer's body is turned |
"""

_STATUS = {
    "busy": "503 Service Unavailable",
    "broken": "500 Internal Server Error",
    "broken_after": "500 Internal Server Error",
    "conflict": "409 Conflict",
    "deny": "403 Forbidden",
}
_CHANGES = {"PUT", "POST", "DELETE"}

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


@dataclass(frozen=True)
class Strike:
    """Which requests are struck, and how."""

    effect: Effect
    at: int = 1
    """Which, from 1, of those that match."""
    times: int = 1
    """How many in a row."""
    method: str | None = None
    part: str = ""
    """Part of ``PATH?QUERY``."""
    seconds: float = 0.0

    def matches(self, method: str, target: str) -> bool:
        return self.method in {None, method} and self.part in target


@dataclass
class FaultyServer:
    """A WSGI application round another one."""

    app: App
    strikes: list[Strike] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and ``PATH?QUERY`` of every request."""
    struck: list[Strike] = field(default_factory=list)
    received: int = 0
    """Bytes of the bodies of all requests."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _late: list[threading.Thread] = field(default_factory=list)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        target = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        strike = self._strike(method, target)
        # Read before anything is answered: what stayed in the socket would be the next request.
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            self.received += len(body)
        if strike is None:
            return _answered(start_response, *self._carry_out(environ, body))
        return self._under(strike, environ, body, start_response)

    def forget(self) -> None:
        """Strike nothing any more, and forget what came."""
        self.join()
        self.strikes, self.requests, self.struck, self.received = [], [], [], 0

    def join(self) -> None:
        """Wait for requests that come late."""
        while self._late:
            self._late.pop().join()

    @contextmanager
    def striking(self, *strikes: Strike) -> Iterator[None]:
        """Strike within the block; afterwards every strike must have struck."""
        self.forget()
        self.strikes = list(strikes)
        try:
            yield
        finally:
            self.join()
            self.strikes = []
        assert set(self.struck) == set(strikes), "some faults were never reached"

    def _strike(self, method: str, target: str) -> Strike | None:
        with self._lock:
            self.requests.append((method, target))
            for strike in self.strikes:
                count = sum(strike.matches(*request) for request in self.requests)
                if strike.matches(method, target) and strike.at <= count < strike.at + strike.times:
                    self.struck.append(strike)
                    return strike
        return None

    def _under(
        self, strike: Strike, environ: dict[str, Any], body: bytes, start_response: Any
    ) -> Iterable[bytes]:
        match strike.effect:
            case "busy" | "broken" | "conflict" | "deny":
                return _refused(start_response, strike.effect)
            case "broken_after":
                self._carry_out(environ, body)
                return _refused(start_response, strike.effect)
            case "lose":
                self._carry_out(environ, body)
                return _hang_up(environ)
            case "late":
                self._carry_out_later(environ, body, strike.seconds)
                return _hang_up(environ)
            case "cut" if environ["REQUEST_METHOD"] == "GET":
                status, headers, answer = self._carry_out(environ, body)
                start_response(status, headers)(answer[: len(answer) // 2])
                return _hang_up(environ)
            case "cut":
                return _hang_up(environ)
            case "delay":
                time.sleep(strike.seconds)
            case "repeat":
                self._carry_out(environ, body)
        status, headers, answer = self._carry_out(environ, body)
        if strike.effect == "flip" and answer:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        return _answered(start_response, status, headers, answer)

    def _carry_out(self, environ: dict[str, Any], body: bytes) -> tuple[str, Any, bytes]:
        said: dict[str, Any] = {}

        def start_response(status: str, headers: Any, *_: Any) -> Any:
            said.update(status=status, headers=headers)

        environ = {**environ, "wsgi.input": io.BytesIO(body)}
        if environ["REQUEST_METHOD"] not in _CHANGES:
            return _joined(self.app(environ, start_response), said)
        with self._lock:
            return _joined(self.app(environ, start_response), said)

    def _carry_out_later(self, environ: dict[str, Any], body: bytes, seconds: float) -> None:
        def run() -> None:
            time.sleep(seconds)
            self._carry_out(environ, body)

        thread = threading.Thread(target=run, daemon=True)
        self._late.append(thread)
        thread.start()


@dataclass
class IgnoresConditions:
    """A server that takes every condition and looks at none, as some that speak S3 do."""

    app: App

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ = {k: v for k, v in environ.items() if k not in _CONDITIONS}
        return self.app(environ, start_response)


@dataclass
class LooksTooEarly:
    """A server that looks whether a name is free, and some time later takes it."""

    app: App
    seconds: float = 0.05

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self.app(environ, start_response)
        said: list[str] = []
        ask = {**environ, "REQUEST_METHOD": "HEAD", "wsgi.input": io.BytesIO()}
        ask = {k: v for k, v in ask.items() if k not in _CONDITIONS | {"CONTENT_LENGTH"}}
        list(self.app(ask, lambda status, *_: said.append(status)))
        if said[0].startswith("200"):
            return _answered(start_response, "412 Precondition Failed", [], b"")
        time.sleep(self.seconds)
        return IgnoresConditions(self.app)(environ, start_response)


_CONDITIONS = {"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH", "HTTP_X_GOOG_IF_GENERATION_MATCH"}


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        return


@contextmanager
def served(app: App) -> Iterator[str]:
    """Serve an application on loopback, and give its address."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _joined(answer: Iterable[bytes], said: dict[str, Any]) -> tuple[str, Any, bytes]:
    data = b"".join(answer)
    return said["status"], said["headers"], data


def _answered(start_response: Any, status: str, headers: Any, answer: bytes) -> list[bytes]:
    if not any(name.lower() == "content-length" for name, _ in headers):
        headers = [*headers, ("Content-Length", str(len(answer)))]
    start_response(status, headers)
    return [answer]


def _refused(start_response: Any, effect: str) -> list[bytes]:
    answer = f"<Error><Code>Injected</Code><Message>{effect}</Message></Error>".encode()
    return _answered(start_response, _STATUS[effect], [("Content-Type", "text/xml")], answer)


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("injected")
