"""long_texts: work on a caller's text -> its result, in a thread where the text is long: all callers of a process share its event loop.

Two megabytes take seconds to write by a template and to tokenize. Tokenizers leave the interpreter to others meanwhile, and what is
plain Python takes turns with the loop.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 20_000
"""Characters that are worked on in the event loop: they take milliseconds, and a thread would have to be waited for."""
NUM_THREADS = 2
"""Long texts at a time; each may need a hundred times its own memory."""


async def worked_on(num_characters: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns on a text of so many characters. A caller who leaves gives up its turn, not work that has begun."""
    if num_characters <= AT_ONCE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads(), giving_back, num_characters, work)


def giving_back(num_characters: int, work: Callable[[], T]) -> T:
    """Returns what `work` returns on a text of so many characters, in this thread.

    The memory that a long text took goes back to the system, which C's library does not do by itself.
    """
    if num_characters <= AT_ONCE:
        return work()
    try:
        return work()
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long-texts")
