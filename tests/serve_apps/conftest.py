"""Records, the event loop and the gateway of tests of serving."""

from pathlib import Path
from typing import Any

import pytest
from records import make_trace

__all__ = ["make_trace"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def scene(tiny_model: Path) -> Any:
    """A gateway that serves version 3 of team `demo`."""
    from gateway_scene import Scene  # which takes seconds to import

    return Scene(tiny_model)
