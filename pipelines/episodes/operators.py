"""operators: what Ray Data runs between groups of episodes and the trace store; actors that stay warm do the work.

Ray Data starts new processes in every pass, so that this module imports little, and passes on as bytes what only the actors read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""A collector that ended is asked again after so long."""


def play(groups: pa.Table, workers: Sequence[Any], work: bytes) -> Iterator[pa.Table]:
    """Has the collectors play their groups, and passes on the blocks that they hand over, as they come.

    One that ended is asked again until Ray has started it anew: it leaves out what is stored.
    """

    def ask(place: int) -> Any:
        own = groups.filter(pc.equal(groups["place"], place))["specs"].to_pylist()
        return workers[place].play.options(num_returns="streaming").remote(own, place=place, work=work)

    streams = {place: ask(place) for place in sorted(set(groups["place"].to_pylist()))}
    while streams:
        (ready,), _ = ray.wait(list(streams.values()), num_returns=1)
        place = next(place for place, stream in streams.items() if stream is ready)
        try:
            yield ray.get(next(ready))
        except StopIteration:
            del streams[place]
        except (ActorUnavailableError, ObjectLostError) as error:
            logger.warning("collector %d ended and is asked again: %s", place, error)
            time.sleep(ASK_AGAIN_S)
            streams[place] = ask(place)


class StoreBlocks:
    """An actor of a pass, so that it starts while the first episodes are played: a task would start a process after them."""

    def __init__(self, *, workers: Sequence[Any], writer: Any, pass_id: str, target: bytes) -> None:
        self._workers, self._writer, self._pass_id, self._target = workers, writer, pass_id, target

    def __call__(self, block: pa.Table) -> pa.Table:
        """Has the writer store the episodes of a block, and its collector know; returns the block's figures."""
        if block["num"][0].as_py():
            ray.get(self._writer.write.remote(block["episodes"].combine_chunks(), self._target))
            self._workers[block["place"][0].as_py()].stored.remote(self._pass_id, block["name"][0].as_py())
        return block.drop_columns(["episodes", "name", "place"])
