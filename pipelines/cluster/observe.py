"""observe: what happens in a run -> the extensions that show it to others, and lines in the log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Concatenate, ParamSpec

from stores.by_name import open_by_name
from stores.extensions import extensions, left_out_if_broken
from stores.journal.journal import StageRow
from stores.logs import Sparingly, bound
from stores.types import SOUND, Trace

logger = logging.getLogger(__name__)
_failures = Sparingly(logger)
P = ParamSpec("P")


class Observer:
    """Is told what happens in a run, by any of its processes, and of one thing perhaps twice. None of these methods may wait."""

    def stages(self, rows: Sequence[StageRow], *, has_latest: bool) -> None:
        """Stages, some of which have ended. Args: has_latest: no later iteration of the run has one that has ended."""

    def champion(self, run_id: str, version: int) -> None:
        """The team version that is the champion now."""

    def episodes(self, traces: Sequence[Trace], *, num_in_flight: int, collector: str) -> None:
        """Episodes of one run and purpose that were stored together."""

    def check(self, run_id: str, check: Mapping[str, Any]) -> None:
        """A check of the champion's figures: `{"key", "sources": {source: {figure: {"now", "state", ...}}}, ...}`. That of an iteration is
        `watch` in what its `record` returned."""


@cache
def observers() -> Sequence[Observer]:
    """Returns an observer of each extension that has one; one that cannot be made is named in the log, and must not end a stage either."""
    found: list[Observer] = []
    for extension in extensions():
        if extension.observer:
            with left_out_if_broken(f"the observer of extension {extension.name}"):
                found.append(open_by_name(extension.observer, place=f"extension {extension.name}")())
    return found


def tell(what: Callable[Concatenate[Observer, P], None], *values: P.args, **more: P.kwargs) -> None:
    """Calls this method of every observer. One that raises is named in the log: it may be anybody's, and must not end a stage."""
    for observer in observers():
        try:
            getattr(observer, what.__name__)(*values, **more)
        except Exception as error:  # noqa: BLE001 - boundary: code of another package
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = "observer %s.%s raised %s at %s line %s"  # not its message, which may quote a prompt
            about = (type(observer).__qualname__, what.__name__, type(error).__name__, where.filename, where.lineno)
            _failures.warning(text, *about)


def log_failed(traces: Iterable[Trace], *, is_last: bool = True) -> None:
    """A line per episode that failed, as long as they are few; its error is in the trace, it may quote a prompt.

    Args:
        is_last: no others follow in this pass: says how many were left out.
    """
    for trace in traces:
        if trace.status not in SOUND:
            with bound(episode=trace.episode_id):
                _failures.warning(
                    "episode ended as %s (%s), caused by %s, attempt %d",
                    trace.status,
                    trace.stop_reason,
                    trace.cause,
                    trace.attempt,
                )
    if is_last:
        _failures.close()
