"""process_log: what a process that was started writes to standard error, of which the end is kept."""

from __future__ import annotations

import fcntl
import os
import tempfile

TAIL = 2000
"""Bytes that an error quotes."""
MAX_BYTES = 4 * 2**20
"""Beyond them only the end is kept."""


class ProcessLog:
    """A file without a name that processes append to."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) | os.O_APPEND)

    def tail(self) -> str:
        """Returns the end, as part of an error; empty where there is none."""
        tail = b"" if self.file.closed else self._last_bytes()
        text = tail.decode(errors="replace").strip()
        return f"; it said: {text}" if text else ""

    def shorten(self) -> None:
        """Leaves the end of a log that has become too long."""
        if not self.file.closed and os.fstat(self.file.fileno()).st_size > MAX_BYTES:
            end = self._last_bytes()
            self.file.truncate(0)
            self.file.write(end)
            self.file.flush()

    def close(self) -> None:
        """Gives the file back."""
        self.file.close()

    def _last_bytes(self) -> bytes:
        self.file.seek(max(0, os.fstat(self.file.fileno()).st_size - TAIL))
        return self.file.read()
