"""peer: a request to a server of somebody else -> its answer, or a `PeerError` that says at whom it lies.

    what comes                                                                            | fault   | again?
    no connection, a cut body, an answer too late, too large or packed; 408, 425, 429,    | peer    | yes, after `Retry-After`
      500, 502, 503, 504                                                                  |         |
    400, 413, 414, 422                                                                    | request | no
    401, 403, a header that cannot be sent, and a proxy that cannot be asked              | caller  | no
    a redirect, any other status, an answer that is no HTTP                               | address | no

Redirects are never followed: they would take a token along, and turn POST into GET. HTTP_PROXY and NO_PROXY hold, but never for this
machine, whatever they say. Whoever asks says what a fault means to it: a failed tool, an error of the config, an attempt more.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httpx2

from stores.urls import PROXIES, direct_mounts, is_loopback, without_secrets

Fault = Literal["peer", "address", "caller", "request"]
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
REFUSED_REQUEST = frozenset({400, 413, 414, 422})
MAX_ANSWER_BYTES = 16 << 20
PACKINGS = frozenset({"gzip", "deflate", "br", "zstd", "compress"})
KEEPALIVE_S = 2.0
"""How long a connection is kept for the next request: less than servers keep it, which would close it just then."""
LONGEST_RETRY_AFTER_S = 60.0


class PeerError(Exception):
    """Raised where a server gives no answer of those that were asked for. The text does not name the server."""

    def __init__(
        self,
        said: str,
        fault: Fault,
        *,
        status: int | None = None,
        text: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """Args: status: None where no answer came. text: the body of the answer. retry_after_s: what it asks to wait."""
        super().__init__(said)
        self.fault, self.status, self.text, self.retry_after_s = fault, status, text, retry_after_s


class BadAnswer(httpx2.StreamError):
    """Raised while an answer is read that is packed, too large or too slow. MCP's client knows its base."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that came in time, with a status that was asked for."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The content in UTF-8, whatever its head says of it."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Reads the content as JSON; ValueError shows its beginning."""
        return read_json(self.content)


class Peer:
    """Asks a server from a thread, over a new connection each time: a request that starts a job must not meet a closed one."""

    def __init__(self, url: str, *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES, is_ours: bool = False) -> None:
        """Connects to nothing yet; PeerError for a proxy. Args: see `AsyncPeer`; max_bytes: of an answer."""
        self._timeout_s = timeout_s
        with _proxy_named():
            self._client = httpx2.Client(
                **_settings([url], is_ours=is_ours),
                timeout=timeout_s,
                limits=httpx2.Limits(max_keepalive_connections=0),
                event_hooks={"response": [partial(_bound, max_bytes=max_bytes)]},
            )

    def ask(
        self, method: str, url: str, *, accepts: Collection[int] = (200,), answer_s: float | None = None, **request: Any
    ) -> Answer:
        """Returns an answer with one of these statuses; PeerError. A server that drips may take `timeout_s` twice.

        Args:
            answer_s: for all of a long answer, in place of `timeout_s`, which limits each silence in it all the same.
            request: what httpx2 takes: `content`, `json`, `headers`.
        """
        with _told(self._timeout_s):
            within_s = {"within_s": answer_s or self._timeout_s}
            response = self._client.request(method, url, extensions=within_s, **request)
        return _accepted(response, accepts)


class AsyncPeer:
    """Asks servers in one event loop, over connections that are kept for `KEEPALIVE_S`."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        """Connects to nothing yet; PeerError for a proxy.

        Args:
            urls: of all servers that are asked, by which those of this machine are known.
            timeout_s: for a request, from the connection to the last byte of the answer.
        """
        self._timeout_s = timeout_s
        self._client = async_client(urls, timeout=None, max_bytes=max_bytes)

    async def ask(self, method: str, url: str, *, accepts: Collection[int] = (200,), **request: Any) -> Answer:
        """Returns an answer with one of these statuses; PeerError. See `Peer.ask`."""
        with _told(self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request(method, url, **request)
        return _accepted(response, accepts)

    async def close(self) -> None:
        """Closes the connections that are kept."""
        await self._client.aclose()


def async_client(
    urls: Sequence[str],
    *,
    timeout: httpx2.Timeout | None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int | None = MAX_ANSWER_BYTES,
    is_ours: bool = False,
) -> httpx2.AsyncClient:
    """Returns a client by these rules for a library that takes one, or for answers that are passed on as they come.

    PeerError where a variable of the environment names a proxy that cannot be asked.

    Args:
        max_bytes: of an answer that is no stream of events; None: no limit.
        is_ours: the servers are Troupe's own, which are behind no proxy.
    """

    async def bound(response: httpx2.Response) -> None:
        if max_bytes is not None:
            _bound(response, max_bytes=max_bytes)

    settings = _settings(urls, is_ours=is_ours, headers=headers)
    with _proxy_named():
        return httpx2.AsyncClient(
            **settings,
            timeout=timeout,
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
            event_hooks={"response": [bound]},
        )


def fault_of(status: int) -> Fault:
    """Returns at whom a status lies that was not asked for."""
    if status in PASSING:
        return "peer"
    return "request" if status in REFUSED_REQUEST else "caller" if status in (401, 403) else "address"


def read_json(content: str | bytes) -> Any:
    """Reads JSON of a peer; ValueError shows its beginning. Bytes are UTF-8, whatever a head says, with or without its mark."""
    try:
        text = content if isinstance(content, str) else content.decode()
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        shown = content[:200] if isinstance(content, str) else content[:200].decode(errors="replace")
        raise ValueError(f"an answer that is not JSON: {shown!r}") from None


def pause_s(number: int, *, first_s: float, longest_s: float) -> float:
    """Returns how long to wait before attempt `number` is repeated, counted from 0: it doubles, and differs between callers."""
    return min(longest_s, first_s * 2.0 ** min(number, 32)) * random.uniform(0.5, 1.0)


def _settings(
    urls: Sequence[str], *, is_ours: bool = False, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    # Packed answers are not asked for: a few kilobytes of gzip become gigabytes.
    return {
        "headers": httpx2.Headers({"Accept-Encoding": "identity", **(headers or {})}),
        "trust_env": not is_ours and not all(map(is_loopback, urls)),
        "verify": httpx2.create_ssl_context(),  # SSL_CERT_FILE holds for this machine, too
        "mounts": direct_mounts(urls),
        "follow_redirects": False,
    }


@contextmanager
def _proxy_named() -> Iterator[None]:
    """Turns what a client raises for a proxy of the environment into a PeerError without the proxy's password."""
    try:
        yield
    except (ImportError, ValueError, httpx2.InvalidURL):
        set_ones = [variable for name in PROXIES for variable in (name, name.upper()) if os.environ.get(variable)]
        if not set_ones:
            raise
        names = [variable for variable in set_ones if not _is_proxy(os.environ[variable])] or set_ones
        said = (
            f"{', '.join(names)} must be http://HOST:PORT or https://HOST:PORT of a proxy, signs of a password as %XX"
        )
        raise PeerError(said, "caller") from None


def _is_proxy(address: str) -> bool:
    try:
        httpx2.Client(proxy=address if "://" in address else f"http://{address}", trust_env=False).close()
    except (ImportError, ValueError, httpx2.InvalidURL):
        return False
    return True


class _Bounded(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The bytes of an answer, until they are too many or come too late."""

    def __init__(self, stream: Any, *, max_bytes: int, within_s: float) -> None:
        self._stream, self._max_bytes, self._num_bytes = stream, max_bytes, 0
        self._within_s, self._deadline = within_s, time.monotonic() + within_s

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield self._counted(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield self._counted(part)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _counted(self, part: bytes) -> bytes:
        self._num_bytes += len(part)
        if self._num_bytes > self._max_bytes:
            raise BadAnswer(f"an answer of more than {self._max_bytes >> 20} MiB")
        if time.monotonic() > self._deadline:
            raise BadAnswer(f"timed out: no whole answer within {self._within_s:g} s")
        return part


def _bound(response: httpx2.Response, *, max_bytes: int) -> None:
    """Limits what is read of an answer; a stream of events has no end, and its reader limits the events."""
    packing = response.headers.get("content-encoding", "")
    if not PACKINGS.isdisjoint(name.strip() for name in packing.lower().split(",")):
        raise BadAnswer(f"an answer packed as {packing[:20]!r}, which was not asked for")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        within_s = response.request.extensions.get("within_s", float("inf"))
        response.stream = _Bounded(response.stream, max_bytes=max_bytes, within_s=within_s)


@contextmanager
def _told(timeout_s: float) -> Iterator[None]:
    """Turns what a connection raises into a PeerError."""
    try:
        yield
    except (TimeoutError, httpx2.TimeoutException):
        raise PeerError(f"timed out: no whole answer within {timeout_s:g} s", "peer") from None
    except BadAnswer as error:
        raise PeerError(str(error), "peer") from None
    except httpx2.RemoteProtocolError as error:
        is_http = not str(error).startswith("illegal")  # h11 says so of a head that it cannot read
        raise PeerError(f"{type(error).__name__}: {error}", "peer" if is_http else "address") from None
    except httpx2.LocalProtocolError as error:
        raise PeerError(f"the request cannot be sent: {error}", "caller") from None
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise PeerError(f"no address: {error}", "address") from None
    except UnicodeEncodeError as error:  # its text would show a part of a token
        where = f"at {error.start} stands a sign that is not in {error.encoding}"
        if error.encoding == "ascii":
            raise PeerError(f"the request cannot be sent: in a header, {where}", "caller") from None
        raise PeerError(f"the request cannot be sent: in its body, {where}", "request") from None
    except httpx2.HTTPError as error:
        raise PeerError(f"{type(error).__name__}: {error}", "peer") from None


def _accepted(response: httpx2.Response, accepts: Collection[int]) -> Answer:
    status, answer = response.status_code, Answer(response.status_code, response.content)
    if status in accepts:
        return answer
    said = f"answered HTTP {status}: {answer.text[:200]!r}"
    if location := response.headers.get("location"):
        said = f"answered HTTP {status}, a redirect to {without_secrets(location[:200])}, which is not followed"
    wish = response.headers.get("retry-after", "")
    retry_after_s = min(float(wish), LONGEST_RETRY_AFTER_S) if wish.isdecimal() and len(wish) < 10 else 0.0
    raise PeerError(said, fault_of(status), status=status, text=answer.text, retry_after_s=retry_after_s)
