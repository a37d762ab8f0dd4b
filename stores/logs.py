"""logs: writes log lines that name the run, iteration, stage and model group they belong to, as JSON or text.

    TROUPE_LOG=json   one JSON object per line, INFO and above
    TROUPE_LOG=text   the same as text
    unset             warnings as text, and what a long stage is at as a bare line: `troupe train` itself prints enough

`bound(run=..., stage=...)` adds fields to every line that is logged inside it, also by threads and tasks that copy the
context. `carry` and `carried` bring fields and format to an actor on another machine. No line holds the text of a prompt or
a completion: these are users' data, and belong into the trace store.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

VARIABLE = "TROUPE_LOG"
FORMATS = ("json", "text")
PACKAGES = ("pipelines", "serve_apps", "train_loops", "stores")
PROGRESS = "pipelines.run.watchdog"
"""The module whose INFO lines are shown without a format, too."""

_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039 - never changed in place


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Adds fields to every line logged inside; empty ones are left out."""
    token = _fields.set({**_fields.get(), **{name: value for name, value in fields.items() if value not in ("", None)}})
    try:
        yield
    finally:
        _fields.reset(token)


def configure() -> None:
    """Makes this process write lines as TROUPE_LOG says; it may be called again.

    Raises ValueError for a value that is neither json nor text.
    """
    format_name = os.environ.get(VARIABLE, "")
    if format_name and format_name not in FORMATS:
        raise ValueError(f"{VARIABLE}={format_name!r} is unknown: use {' or '.join(FORMATS)}, or unset it")
    root = logging.getLogger()
    ours = next((handler for handler in root.handlers if isinstance(handler, _Handler)), None)
    if ours is None:
        ours = _Handler()
        root.addHandler(ours)
    ours.setFormatter(_Json() if format_name == "json" else _Text())
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO if format_name else logging.WARNING)
    logging.getLogger(PROGRESS).setLevel(logging.INFO)


def carry() -> dict[str, Any]:
    """Returns format and fields of the calling context as plain data, for `carried` in another process."""
    return {"format": os.environ.get(VARIABLE, ""), "fields": dict(_fields.get())}


@contextmanager
def carried(data: Mapping[str, Any]) -> Iterator[None]:
    """Logs inside like the process that sent `data`, which `carry` made; without a format there, as TROUPE_LOG says here."""
    if data.get("format"):
        os.environ[VARIABLE] = data["format"]
    configure()
    with bound(**data.get("fields", {})):
        yield


class Sparingly:
    """Logs at most `count` lines in `seconds`, then one that says how many were left out."""

    def __init__(self, logger: logging.Logger, *, count: int = 10, seconds: float = 60.0) -> None:
        self._logger, self._count, self._seconds = logger, count, seconds
        self._since, self._num_logged, self._num_left_out = 0.0, 0, 0

    def warning(self, message: str, *values: Any) -> None:
        """Logs a warning unless there were too many."""
        now = time.monotonic()
        if self._num_logged and now - self._since > self._seconds:
            self.close()
        if not self._num_logged:
            self._since = now
        if self._num_logged < self._count:
            self._num_logged += 1
            self._logger.warning(message, *values)
        else:
            self._num_left_out += 1

    def close(self) -> None:
        """Says how many lines were left out, if any, and starts afresh."""
        if self._num_left_out:
            self._logger.warning("... and %d more like these", self._num_left_out)
        self._num_logged = self._num_left_out = 0


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the standard error of the moment; standard output is for results."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] in PACKAGES)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        """Returns the stream anew each time: tests and Ray replace it."""
        return sys.stderr


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": _clock(record.created),
            "level": record.levelname,
            "logger": record.name,
            **_fields.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING and not os.environ.get(VARIABLE):
            return record.getMessage()
        fields = " ".join(f"{name}={value}" for name, value in _fields.get().items())
        line = f"{_clock(record.created)} {record.levelname} {record.name}{f' [{fields}]' if fields else ''} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}Z"
