"""Extract a smaller module from a model, its channel graph and a plan."""

from .extract import extract
from .verify import max_relative_difference, prove

__all__ = ["extract", "max_relative_difference", "prove"]
