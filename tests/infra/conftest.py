"""A fixture that several folders share."""

from records import make_trace

__all__ = ["make_trace"]
