"""Records and the event loop of tests of serving."""

import pytest
from records import make_trace

__all__ = ["make_trace"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
