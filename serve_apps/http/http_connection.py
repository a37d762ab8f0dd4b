"""http_connection: a connection of one of our servers, on which a request to go on in another protocol is answered in HTTP/1.1.

A server may ignore `Upgrade` (RFC 9110, section 7.8). The parser beneath uvicorn takes what follows the head of such a request for
the other protocol and loses its body, and the JDK's client asks for `h2c` with its first request.
"""

from __future__ import annotations

import sys

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpConnection(HttpToolsProtocol):
    """A connection that upgrades to websockets, where the server has them, and to nothing else."""

    _unread = b""
    """What the parser has yet to read."""

    def data_received(self, data: bytes) -> None:
        """Reads on until nothing is left: a head that asked for an upgrade is read a second time, without it."""
        self._unread = data
        while self._unread and not self.transport.is_closing():
            self._reading, self._unread = self._unread, b""
            super().data_received(self._reading)

    def on_headers_complete(self) -> None:
        """Begins no request on a head that will be read again."""
        if not self._is_read_again():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends no request there."""
        if not self._is_read_again():
            super().on_message_complete()

    def _is_read_again(self) -> bool:
        # CONNECT has no path: uvicorn refuses it with status 400.
        return self.parser.should_upgrade() and not self._should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Gives the parser the same request once more; uvicorn calls this where it would only warn."""
        if not self._is_read_again():
            return
        upgrade = sys.exception()
        assert isinstance(upgrade, HttpParserUpgrade), "uvicorn calls this while it handles the parser's exception"
        (end_of_head,) = upgrade.args
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode()))
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._unread = b"\r\n".join((line, *headers, b"", b"")) + self._reading[end_of_head:]
        self.parser = HttpRequestParser(self)  # the one before reads nothing more where the connection was to close
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
