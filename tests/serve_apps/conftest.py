"""Records for tests of serving."""

from records import make_trace

__all__ = ["make_trace"]
