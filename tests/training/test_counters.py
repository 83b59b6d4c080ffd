"""Batch norms that leave counting to somebody else."""

import pytest
import torch
from torch import nn

from sbf_pruner.training.engine import BatchCounters


def network() -> nn.Module:
    norms = [nn.BatchNorm2d(2), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm2d(2, track_running_stats=False)]
    return nn.Sequential(*norms, nn.BatchNorm2d(2).eval())


@pytest.mark.parametrize("compiled", [False, True])
def test_counts_are_those_of_a_plain_loop(compiled: bool) -> None:
    plain, counted = network(), network()
    forward = torch.compile(counted, backend="eager") if compiled else counted
    for _ in range(3):
        images = torch.rand(4, 2, 3, 3)
        plain(images)
        with BatchCounters(counted) as counters:
            forward(images)
            assert counted[0].num_batches_tracked is None, "nothing is counted in a forward"
            counters.count()
    assert plain.state_dict().keys() == counted.state_dict().keys()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(counted.state_dict()[name], expected, rtol=0, atol=0)
    assert [int(counted[i].num_batches_tracked) for i in (0, 1, 3)] == [3, 3, 0]
