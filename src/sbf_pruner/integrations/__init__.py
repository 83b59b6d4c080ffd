"""Pruning in training loops that somebody else has written: three calls, or a callback that makes them."""

from .turns import Turns

__all__ = ["Turns"]
