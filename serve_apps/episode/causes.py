"""causes: what ended an attempt at an episode -> who caused it: the infrastructure, the policy or the author.

| what ended the attempt                                                              | cause            |
|-------------------------------------------------------------------------------------|------------------|
| the engines (`PolicyCallError`), a turn past its deadline (`CallTimeout`), a service behind a tool (`ToolFault`) | `infrastructure` |
| `AuthorError`: wrong whatever a model wrote                                         | `author`         |
| anything else, after a turn was answered: what it wrote may have led there          | `policy`         |
| anything else, before any turn was answered                                         | `author`         |
| a deadline, more than half of the time until which was spent waiting (`waited_s`)   | `infrastructure` |
| a deadline otherwise                                                                | as anything else |

A failure counts as the policy's unless it cannot be, because a policy that could take lost episodes out of the comparison
would be rewarded for doing so. Waiting is what no policy can prolong: attempts at a model call that the engines failed, model
calls that were not answered, and calls of tools that failed by themselves. A completion that was answered at the first attempt,
however long, and a tool call that came back are not waiting. A single unanswered call cannot make up half of the time by
itself as long as `turn_timeout_s` is at most half of `episode_timeout_s`.

What may still show that the author caused a failure is that all episodes of a task end in it, whatever was sampled:
`pipelines.run.scoring.failures_alike`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serve_apps.authoring.agent import AuthorError, ToolFault
from serve_apps.policy.client import PolicyCallError
from stores.types import Cause


class CallTimeout(TimeoutError):
    """Raised where a model call was not answered within `turn_timeout_s`."""


def cause_of_error(error: BaseException, *, num_turns: int) -> Cause:
    """Returns who caused what a workflow raised. Args: num_turns: how many turns were answered before."""
    chain = list(_chain(error))
    if any(isinstance(link, (PolicyCallError, ToolFault, CallTimeout)) for link in chain):
        return Cause.INFRASTRUCTURE
    if any(isinstance(link, AuthorError) for link in chain):
        return Cause.AUTHOR
    return Cause.POLICY if num_turns else Cause.AUTHOR


def cause_of_delay(*, seconds: float, waited_s: float, num_turns: int) -> Cause:
    """Returns who caused that an episode did not end in time. Args: seconds: since it began. waited_s: as above."""
    if waited_s > seconds / 2:
        return Cause.INFRASTRUCTURE
    return Cause.POLICY if num_turns else Cause.AUTHOR


def first_error(raised: BaseException) -> BaseException:
    """Returns what was raised; of a group, as an `asyncio.TaskGroup` raises it, the error that came first."""
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    return raised


def words_of(error: BaseException) -> str:
    """Returns an error's text; empty where its class, which may be anybody's, fails to make one."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - `__str__` of a class that may be anybody's
        return ""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of spans, each from its start to its end."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, those of its group, and those in whose handling it was raised."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__cause__ or link.__context__]
        todo += list(link.exceptions) if isinstance(link, BaseExceptionGroup) else []
