import torch

from sbf_pruner.utils import call, map_tensors


def test_call_spreads_tuples_and_dicts_and_nothing_else():
    def taken(*args, **kwargs):
        return args, kwargs

    x, y = torch.zeros(1), torch.ones(1)
    assert call(taken, x) == ((x,), {})
    assert call(taken, (x, y)) == ((x, y), {})
    assert call(taken, {"a": x}) == ((), {"a": x})
    assert call(taken, [x, y]) == (([x, y],), {})


def test_map_tensors_reaches_every_nest_and_keeps_the_rest():
    inputs = (torch.zeros(2), {"a": [torch.ones(1)], "b": 7}, None)
    moved = map_tensors(inputs, lambda t: t.to("meta"))
    assert moved[0].device.type == moved[1]["a"][0].device.type == "meta"
    assert moved[1]["b"] == 7 and moved[2] is None
    assert inputs[0].device.type == "cpu"
