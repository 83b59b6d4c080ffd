"""`Scores`: how the score of a filter is computed and trained."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.settings import Section, setting


@dataclass(frozen=True)
class Scores(Section):
    """How the scores of filters are computed and trained; defaults are the paper's where it gives any."""

    projection: str = setting(
        "factored",
        "map from weights to logits: the paper's matrix in a form with few parameters, the matrix itself, or a "
        "logit per filter that is independent of the weights",
        choices=("factored", "literal", "free"),
    )
    lr: float = setting(1e-6, "learning rate of the scores' Adam", above=0)
    eps: float = setting(1e-8, "eps of the scores' Adam", least=0)
    leak: float = setting(0.1, "slope of the leaky exponential above 0", least=0)
    # Steering may raise it 10,000-fold, and Adam squares its gradient.
    penalty: float = setting(5e-4, "weight of the scores' l1 norm (lambda)", least=0, most=1e10)
    balance: str = setting(
        "auto",
        "weight of each layer in the penalty: area or side of its feature maps, or the cost of a filter in the "
        "resources of the budget; auto: cost with a budget, otherwise area",
        choices=("auto", "area", "side", "none", "cost"),
    )
    threshold: float = setting(0.5, "score from which a filter is kept", above=0, most=1)
    speed: float = setting(
        0.0,
        "distance a logit moves in a step, the same in every layer; 0: lr times the l1 norm of the layer's weights "
        "or, in a run with a budget and steer, as far as the target needs",
        least=0,
    )
    activation: str = setting(
        "leaky_exponential",
        "activation function from logits to scores",
        choices=("leaky_exponential", "sigmoid"),
    )
    binary: bool = setting(
        False, "use binary gates in score phases too, with straight-through gradients to the scores"
    )
    blocks: bool = setting(
        False, "a score for every residual branch too, multiplied into those of the filters it adds"
    )
    freeze_norms: bool = setting(True, "batch norms use their running statistics in score phases")
    steer: bool = setting(
        True,
        "adjust the penalty while scores are trained, so that they come close to the budget by themselves; without "
        "a budget it has no effect",
    )
