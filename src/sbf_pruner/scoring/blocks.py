"""One score for a whole residual branch, multiplied into the scores of its filters.

The residual blocks of a network enter; factors leave, one per filter, 1 for filters of no branch.  What holds: at
first every factor is 1; where a block's score falls, all filters that its branch adds to the stream fall
together, and the gates close the branch as one: runtimes are gladder of a block less than of its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SPEED = 1e-3  # how far a block's logit moves in a step where filters have no speed in logits


class BlockScores:
    """Scores of residual branches.

    >>> blocks = BlockScores(["b"], {"a": slice(0, 2), "b": slice(2, 3)}, torch.ones(3))
    >>> blocks.load_state_dict({"logits": torch.tensor([-1.0])})
    >>> blocks.factors(torch.relu).tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, layers: Sequence[str], spans: Mapping[str, slice], like: Tensor) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self.logits = torch.zeros(len(self.layers), dtype=like.dtype, device=like.device, requires_grad=True)
        block = torch.zeros(len(like), dtype=torch.long)  # the first of the factors is that of no block
        for place, name in enumerate(self.layers, start=1):
            block[spans[name]] = place
        self._block = block.to(like.device)

    def group(self, speed: float) -> dict[str, Any]:
        """What an optimiser trains, as fast as the filters if they have a speed."""
        return {"params": [self.logits], "lr": speed or SPEED}

    def factors(self, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """One factor per filter."""
        scores = activation(self.logits)
        return torch.cat([torch.ones_like(scores[:1]), scores]).index_select(0, self._block)

    def state_dict(self) -> dict[str, Any]:
        """What training has changed."""
        return {"logits": self.logits.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state."""
        with torch.no_grad():
            self.logits.copy_(state["logits"])
