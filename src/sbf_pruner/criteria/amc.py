"""AMC: an agent chooses the width of each layer by reinforcement learning (He et al., 2018).

In each walk the agent visits all layers in order. It observes properties of a layer and the fractions kept in
earlier layers, and chooses the fraction of its filters to keep. Within a layer the filters with the largest weights
are kept. The reward is the accuracy of the resulting network, and actor and critic learn from all walks so far
(DDPG: Lillicrap et al., 2016). The fractions are converted to scores, from which filters are selected for the
target, so every network that is tried has the target size. Differences from AMC: see `unlike` in `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..graph.channel_graph import ChannelGraph, Layer
from .ranking import SubnetEvaluator, target_of
from .subject import Scores, Subject
from .weights import l1_norm

_WALKS = 60
_AT_RANDOM = 0.25  # fraction of the walks with random actions, which come before those of the agent
_LEAST = 0.1  # smallest fraction of a layer, before all layers are scaled to the target
_NOISE = (0.5, 0.05)  # standard deviation of an action in the first walk that uses the agent, and in the last
_RANDOM = 10.0  # a standard deviation so large that truncated actions are nearly uniform
_HIDDEN = 64
_SAMPLED = 64  # batch size of the training steps
_ACTOR_RATE, _CRITIC_RATE = 3e-3, 1e-2


@torch.enable_grad()
def search_widths(subject: Subject) -> Scores:
    """Return the scores that select the filters of the best walk's network for the target."""
    subnets, selector, observed = SubnetEvaluator(subject), target_of(subject), LayerObservations(subject.graph)
    # The rank of a filter in its layer: 1 for the one with the largest weights.
    places = {name: np.argsort(np.argsort(-values, kind="stable")) + 1 for name, values in l1_norm(subject).items()}
    agent = Agent(observed.features, subject.seed)
    # The reward counts images, so it cannot distinguish more walks than there are images.
    walks = min(_WALKS, sum(len(labels) for _, labels in subnets.batches))
    random_walks = math.ceil(_AT_RANDOM * walks)
    found: Scores = {}
    best = -math.inf
    for walk in range(walks):
        fading = (walk - random_walks) / max(walks - 1 - random_walks, 1)
        noise = _NOISE[0] * (_NOISE[1] / _NOISE[0]) ** fading if walk >= random_walks else _RANDOM
        fractions: list[float] = []
        for _ in places:
            fractions.append(agent.act(observed.state(fractions), noise))
        scores = scores_for_fractions(dict(zip(places, fractions, strict=True)), places)
        masks = selector.choose(scores).masks
        reward = subnets.accuracy(masks)
        if reward > best:
            best, found = reward, scores
        # Learn from the fractions kept after selection for the target, not from those that the agent chose.
        kept = [float(masks[name].mean()) for name in places]
        agent.remember([observed.state(kept[:place]) for place in range(len(kept))], kept, reward)
        for _ in kept if walk + 1 >= random_walks else ():
            agent.learn()
    return found


def scores_for_fractions(parts: Mapping[str, float], places: Mapping[str, NDArray[np.int64]]) -> Scores:
    """Return scores with which a threshold of 1 keeps the chosen fraction of the filters of each layer.

    Any other threshold keeps fractions in the same ratio. `places` are the ranks of the filters, from 1.

    >>> {name: values.round(2).tolist() for name, values in scores_for_fractions(
    ...     {"a": 0.5, "b": 0.25}, {"a": np.array([1, 2, 3, 4]), "b": np.array([2, 1, 4, 3])}
    ... ).items()}
    {'a': [2.0, 1.0, 0.67, 0.5], 'b': [0.5, 1.0, 0.25, 0.33]}
    """
    return {name: parts[name] * len(own) / own for name, own in places.items()}


class LayerObservations:
    """The observations of the agent at each layer."""

    def __init__(self, graph: ChannelGraph) -> None:
        rows = np.array([_described(layer) for layer in graph.layers.values()], np.float64)
        self._macs = rows[:, -1] / max(rows[:, -1].sum(), 1)
        rest = self._macs.sum() - self._macs.cumsum()
        fixed = np.column_stack([np.arange(len(rows)), rows, rest])
        span = np.ptp(fixed, axis=0)
        self._fixed = (fixed - fixed.min(0)) / np.where(span, span, 1)
        self.features = self._fixed.shape[1] + 2

    def state(self, kept: Sequence[float]) -> Tensor:
        """Return the observation at the layer after those in `kept`, the fractions kept so far.

        It consists of the properties of the layer, the fraction of all MACs removed so far, and the last fraction
        kept. MACs are estimated as if each layer read the output of the previous one.
        """
        place, last = len(kept), kept[-1] if kept else 1.0
        left = self._macs[:place] * kept * np.array([1.0, *kept])[:place]
        return torch.from_numpy(np.append(self._fixed[place], [(self._macs[:place] - left).sum(), last])).float()


def _described(layer: Layer) -> tuple[float, ...]:
    """Return the numbers of filters, input channels and input pixels, stride, kernel size and MACs of a layer."""
    node = layer.nodes[0]
    read, made = (math.prod(value.shape[2:]) for value in (node.x, node.out))
    weights = math.prod(node.weight.shape)
    macs = sum(weights * math.prod((run.x if run.transposed else run.out).shape[2:]) for run in layer.nodes)
    return layer.filters, node.x.shape[1], read, read / made, math.prod(node.weight.shape[2:]), macs


class Agent:
    """A DDPG agent: an actor, a critic that predicts the reward of an action, and their replay memory."""

    def __init__(self, features: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._actor, self._critic = _network(features), _network(features + 1)
        self._random = torch.Generator().manual_seed(seed)
        self._actor_optimizer = torch.optim.Adam(self._actor.parameters(), _ACTOR_RATE)
        self._critic_optimizer = torch.optim.Adam(self._critic.parameters(), _CRITIC_RATE)
        self._memory: list[Tensor] = []
        self._baseline: float | None = None

    @torch.no_grad()
    def act(self, state: Tensor, noise: float = 0.0) -> float:
        """Return the fraction of a layer to keep.

        If `noise` is not 0, the fraction is drawn from a truncated normal distribution of this deviation.
        """
        action = self._action(state)
        if noise:
            nn.init.trunc_normal_(action, float(action), noise, _LEAST, 1.0, generator=self._random)
        return float(action)

    def remember(self, states: Sequence[Tensor], actions: Sequence[float], reward: float) -> None:
        """Store the steps of a walk, each with the reward of the whole walk."""
        for state, action in zip(states, actions, strict=True):
            self._memory.append(torch.cat([state, torch.tensor([action, reward], dtype=state.dtype)]))

    def learn(self) -> None:
        """Train the critic and the actor for one step each, on a random sample of the memory."""
        drawn = torch.randint(len(self._memory), (_SAMPLED,), generator=self._random)
        rows = torch.stack([self._memory[number] for number in drawn.tolist()])
        states, reward = rows[:, :-2], rows[:, -1:]
        mean = float(reward.mean())
        self._baseline = mean if self._baseline is None else (self._baseline + mean) / 2
        self._critic_optimizer.zero_grad()
        F.mse_loss(self._critic(rows[:, :-1]), reward - self._baseline).backward()
        self._critic_optimizer.step()
        self._actor_optimizer.zero_grad()
        (-self._critic(torch.cat([states, self._action(states)], 1)).mean()).backward()
        self._actor_optimizer.step()

    def _action(self, states: Tensor) -> Tensor:
        actions: Tensor = _LEAST + (1 - _LEAST) * self._actor(states).sigmoid()
        return actions


def _network(features: int) -> nn.Sequential:
    first, second, last = nn.Linear(features, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN), nn.Linear(_HIDDEN, 1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last).float()
