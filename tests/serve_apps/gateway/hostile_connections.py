"""hostile_connections: bytes that are no proper request: what they are -> what is written to a socket. None may cause a server error.

`KEY` stands for a caller's key.
"""

from __future__ import annotations

from collections.abc import Callable

Bytes = Callable[[], bytes]
CHAT = b'{"model": "demo/solver", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}'
AUTH = b"Authorization: Bearer KEY\r\n"
JSON = b"Content-Type: application/json\r\n"


def get(
    path: bytes = b"/health", *headers: bytes, host: bytes = b"Host: localhost\r\n", version: bytes = b"HTTP/1.1"
) -> bytes:
    return b"GET " + path + b" " + version + b"\r\n" + host + b"".join(h + b"\r\n" for h in headers) + b"\r\n"


def post(*headers: bytes, body: bytes = CHAT, path: bytes = b"/v1/chat/completions", with_size: bool = True) -> bytes:
    size = [b"Content-Length: %d" % len(body)] * with_size
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: localhost", AUTH.strip(), JSON.strip(), *size, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*headers: bytes, body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", *headers, body=body, with_size=False)


def chunks(body: bytes = CHAT, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"%x\r\n" % len(body) + body + b"\r\n" + end


SMUGGLED = get(b"/v1/admin/status")

REQUESTS: dict[str, Bytes] = {
    # two readings of where a body ends
    "a size and chunks": lambda: chunked(b"Content-Length: 5", body=chunks(end=b"0\r\n\r\n" + SMUGGLED)),
    "chunks and then a size": lambda: post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks twice": lambda: chunked(b"Transfer-Encoding: chunked", body=chunks()),
    "chunks that are not last": lambda: chunked(b"Transfer-Encoding: chunked, identity", body=chunks()),
    "another encoding of transfer": lambda: post(b"Transfer-Encoding: xchunked"),
    "a space before the colon": lambda: post(b"Transfer-Encoding : chunked", body=chunks(end=b"0\r\n\r\n" + SMUGGLED)),
    "a tab in the encoding": lambda: post(b"Transfer-Encoding:\tchunked", body=chunks(end=b"0\r\n\r\n" + SMUGGLED)),
    "two sizes": lambda: post(b"Content-Length: 3"),
    "a negative size": lambda: post(b"Content-Length: -1", with_size=False),
    "a size with a sign": lambda: post(b"Content-Length: +90", with_size=False),
    "a size in other digits": lambda: post("Content-Length: ٩".encode(), with_size=False),
    "a size of a quintillion": lambda: post(b"Content-Length: 1" + b"0" * 18, with_size=False),
    "a size of 5,000 digits": lambda: post(b"Content-Length: " + b"9" * 5000, with_size=False),
    "a size that is too small": lambda: post(b"Content-Length: 10", with_size=False),
    "no size at all": lambda: post(with_size=False),
    "a chunk of the largest size": lambda: chunked(body=b"ffffffffffffffff\r\n" + CHAT),
    "a chunk of a size beyond that": lambda: chunked(body=b"f" * 400 + b"\r\n" + CHAT),
    "a chunk with an extension of a megabyte": lambda: chunked(
        body=b"5;" + b"x" * 1_000_000 + b"\r\nabcde\r\n0\r\n\r\n"
    ),
    "trailers without end": lambda: chunked(body=chunks(end=b"0\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n")),
    "lines that end in LF": lambda: post().replace(b"\r\n", b"\n"),
    # heads
    "a head of ten megabytes": lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 10_000_000,
    "a path of ten megabytes": lambda: b"GET /" + b"a" * 10_000_000,
    "100,000 headers": lambda: b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n",
    "a query of sixty kilobytes": lambda: get(b"/v1/models?" + b"a[]=b&" * 10_000, AUTH.strip()),
    "parameters without end": lambda: get(b"/v1/admin/teams/demo/traces?" + b"task=%00&" * 6_000, AUTH.strip()),
    "a key of sixty kilobytes": lambda: get(b"/v1/models", b"Authorization: Bearer " + b"x" * 60_000),
    "a key of no letters": lambda: get(b"/v1/models", b"Authorization: Bearer \xff\xfe\x80"),
    "another kind of key": lambda: get(b"/v1/models", b"Authorization: Basic QTpC"),
    "two keys": lambda: get(b"/v1/models", AUTH.strip(), b"Authorization: Bearer x"),
    "a folded header": lambda: get(b"/health", b"X-A: a\r\n b"),
    "NUL in a header": lambda: get(b"/health", b"X-A: a\0b"),
    "a request id with a line": lambda: get(b"/health", b"x-request-id: a\rSet-Cookie: b"),
    "a request id of bytes": lambda: get(b"/health", b"x-request-id: \xff\x01" + b"a" * 300),
    "no host": lambda: get(host=b""),
    "two hosts": lambda: get(b"/nowhere", b"Host: evil"),
    "a host that is half an address": lambda: get(b"/nowhere", AUTH.strip(), host=b"Host: [\r\n"),
    "a host with a user": lambda: get(b"/nowhere", AUTH.strip(), host=b"Host: a@b:99999\r\n"),
    "a host of sixty kilobytes": lambda: get(b"/nowhere", host=b"Host: " + b"a" * 60_000 + b"\r\n"),
    "a host of bytes": lambda: get(b"/nowhere", AUTH.strip(), host=b"Host: \xff\xfe]:%\r\n"),
    "an origin of another site": lambda: get(
        b"/v1/models", AUTH.strip(), b"Origin: null", b"Sec-Fetch-Site: cross-site"
    ),
    "a preflight of another site": lambda: (
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\n"
        b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: *\r\n\r\n"
    ),
    # other protocols and methods
    "the whole address as path": lambda: get(b"http://evil/v1/models", AUTH.strip()),
    "a tunnel": lambda: b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "TRACE": lambda: b"TRACE /v1/models HTTP/1.1\r\nHost: localhost\r\n" + AUTH + b"\r\n",
    "a method in small letters": lambda: b"get /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a method that there is not": lambda: b"FROBNICATE /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "DELETE with a body": lambda: b"DELETE /v1/episodes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd",
    "GET with a body": lambda: get(b"/v1/models", AUTH.strip(), b"Content-Length: 4") + b"abcd",
    "HEAD of everything": lambda: b"".join(
        b"HEAD " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + AUTH + b"\r\n"
        for path in (b"/", b"/v1/models", b"/metrics", b"/v1/chat/completions")
    ),
    "HTTP 0.9": lambda: b"GET /\r\n",
    "HTTP 9.9": lambda: get(version=b"HTTP/9.9"),
    "HTTP 2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "TLS": lambda: bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "an upgrade to a web socket": lambda: get(
        b"/v1/chat/completions",
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==",
    ),
    "an upgrade to HTTP 2": lambda: get(
        b"/health", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAA"
    ),
    "a body that is announced": lambda: post(b"Expect: 100-continue", body=b""),
    # paths
    **{
        f"the path {path.decode()[:60]}": lambda path=path: get(path, AUTH.strip())
        for path in (
            *(
                b"/%2e%2e/%2e%2e/etc/passwd",
                b"/assets/..%2f..%2fconfig.py",
                b"/assets/%00",
                b"/assets/index.html%00.js",
                b"/%ff%fe",
            ),
            *(
                b"/v1/models/demo%2Fsolver%0d%0aX-A:%20b",
                b"/v1/models/%F0%90%8D%88",
                b"//v1//models",
                b"/v1/models/../admin/status",
            ),
            *(
                b"/v1/episodes/ep-x-y/models",
                b"/v1/episodes/ep-..%2f-y/models",
                b"/v1/episodes/%0aep-a-b/models",
                b"/v1/episodes//models",
            ),
            *(
                b"/v1/admin/teams/demo/traces/%27%20OR%201=1",
                b"/v1/admin/teams/demo/traces?before=%25&limit=1e9",
                b"/v1/admin/status",
            ),
            *(
                b"/v1/admin/teams/demo/tasks/%00%0a",
                b"/v1/traces/%2e%2e/feedback",
                b"/metrics?name[]=x",
                b"/openapi.json?x=%zz",
                b"/?" + b"a" * 5000,
            ),
        )
    },
    # bodies that are packed, or of another type
    **{
        f"a body packed by {name.decode()}": lambda name=name: post(
            b"Content-Encoding: " + name, body=b"\x1f\x8b\x08" + bytes(1000)
        )
        for name in (b"gzip", b"br", b"deflate", b"zstd", b"gzip, gzip", b"GZIP")
    },
    **{
        f"the type {kind.decode('latin-1')[:30]}": lambda kind=kind: post().replace(
            JSON, b"Content-Type: " + kind + b"\r\n"
        )
        for kind in (
            *(
                b"text/plain",
                b"multipart/form-data; boundary=a",
                b"application/x-www-form-urlencoded",
                b"application/json; charset=utf-7",
            ),
            *(
                b"application/json;" * 3000,
                b"\xff/\xfe",
                b"",
                b"application/json, text/html",
                b"application/vnd.x+json",
            ),
        )
    },
    "a thousand requests at once": lambda: get() * 1000,
    "forty calls at once": lambda: post() * 40,
    "a forwarded call of an episode": lambda: post(
        b"x-troupe-forwarded: 1", path=b"/v1/episodes/ep-x-y/chat/completions"
    ),
    "a call of another replica's episode": lambda: post(path=b"/v1/episodes/ep-0badcafe-y/outcome", body=b"{}"),
}
"""What each piece of bytes is -> what makes it."""
