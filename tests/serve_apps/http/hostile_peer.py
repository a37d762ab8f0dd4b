"""hostile_peer: a server that answers every connection in one wrong way, by the name of the way, over plain sockets."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PAGE = b"<html><body>Please log in</body></html>"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "


def answer(content: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{more}\r\n"
    return head.encode() + content


ANSWERS: dict[str, bytes] = {
    "cuts the body": answer(b"[" + b" " * 1000).replace(b"Length: 1001", b"Length: 5000"),
    "hangs up": b"",
    "redirects": answer(b"", status="307 Temporary Redirect", more="Location: http://127.0.0.1:9/elsewhere\r\n"),
    "answers with a page": answer(PAGE, kind="text/html"),
    "answers with a bomb": answer(gzip.compress(b" " * 50_000_000), more="Content-Encoding: gzip\r\n"),
    "gives too short a length": answer(b'{"result": [["a"]]}').replace(b"Length: 19", b"Length: 5"),
    "names a wrong charset": answer('["ä"]'.encode("latin-1"), kind="application/json; charset=utf-8"),
    "answers too deep": answer(b"[" * 100_000),
    "is busy": answer(b"later", status="429 Too Many Requests", more="Retry-After: 0\r\n"),
    "is overloaded": answer(PAGE, status="503 Service Unavailable", kind="text/html"),
    "refuses the caller": answer(b"no", status="403 Forbidden"),
    "refuses the request": answer(b"no", status="422 Unprocessable Entity"),
    "has no such page": answer(PAGE, status="404 Not Found", kind="text/html"),
    "speaks no HTTP": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00",
}
WAYS = (*ANSWERS, "stalls", "drips", "answers without end", "sends a head without end")


class HostilePeer:
    """What it does is `way`; what is sent where that is not one of `ANSWERS` is `content`."""

    def __init__(self, way: str, *, content: bytes = b"", frames: bytes = b"") -> None:
        """Args: content: of a right answer. frames: what follows an upgrade to websockets."""
        self.way, self.content, self.frames = way, content, frames
        self.num_requests = 0
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = _request(connection)
            self.num_requests += 1
            if self.frames:
                key = re.search(rb"(?i)sec-websocket-key: (\S+)", request)
                assert key is not None, "a websocket's client sends a key"
                digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
                connection.sendall(UPGRADE + base64.b64encode(digest) + b"\r\n\r\n" + self.frames)
                self._is_over.wait(0.3)
            elif self.way in ANSWERS:
                connection.sendall(ANSWERS[self.way])
            elif self.way == "closes connections that it kept":
                connection.sendall(answer(self.content))
            elif self.way == "answers slowly":
                for start in range(0, len(whole := answer(self.content)), 100):
                    connection.sendall(whole[start : start + 100])
                    self._is_over.wait(0.1)
            else:
                self._go_on(connection.sendall)

    def _go_on(self, send: Callable[[bytes], None]) -> None:
        """Sends what has no end, until the caller or the test does."""
        if self.way == "stalls":
            self._is_over.wait(20)
            return
        heads = {"drips": b"Content-Length: 9999\r\n\r\n", "answers without end": b"Content-Length: 9999999999\r\n\r\n"}
        send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + heads.get(self.way, b""))
        part = {"drips": b" ", "answers without end": b" " * 65_536}.get(self.way, b"X-A: " + b"a" * 500 + b"\r\n")
        while not self._is_over.wait(0.02 if self.way == "drips" else 0):
            send(part)


def _request(connection: socket.socket) -> bytes:
    """Reads a request, so that the connection is not reset by what it left unread."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65_536)):
            raise OSError("no request")
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(65_536)
    return data


def text_frame(text: bytes) -> bytes:
    """A short text, or the beginning of a longer one, as a server's websocket sends it."""
    assert len(text) < 126
    return bytes((0x81, len(text))) + text


@contextmanager
def hostile_peer(way: str, *, content: bytes = b"", frames: bytes = b"") -> Iterator[HostilePeer]:
    """A server on a port of its own."""
    peer = HostilePeer(way, content=content, frames=frames)
    try:
        yield peer
    finally:
        peer.close()
