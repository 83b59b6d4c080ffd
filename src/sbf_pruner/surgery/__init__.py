"""Extract a smaller module from a model, its channel graph and a plan."""

from .extract import extract
from .verify import cut_error, prove

__all__ = ["cut_error", "extract", "prove"]
