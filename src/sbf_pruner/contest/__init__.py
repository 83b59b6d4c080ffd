"""Methods against each other, with all else equal: `sbf compare`.

A recipe, methods and seeds enter; a run for each leaves, and how they did.  What holds: runs of one seed share
their dense stage and its images; all are asked for the same size and have the same number of epochs, the same
fine-tuning and the same guards; nothing is chosen on the test images, and the last epoch counts.
"""

from .entrants import Entrant, check_methods, enter, finished_before
from .standings import Standing, leave, standings

__all__ = ["Entrant", "Standing", "check_methods", "enter", "finished_before", "leave", "standings"]
