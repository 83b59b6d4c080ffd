"""Which layers can go, which must not, and which do: layers left alone, layers coupled, a plan changed by hand.

Here filters are ranked by their l1 norms; learned scores respect `ignore`, `couple` and plans in the same way.
"""

import torch
from torch import nn

import sbf_pruner as sbf

torch.manual_seed(0)


class Net(nn.Module):
    """A stem, two residual branches, attention over channels, and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)) for _ in range(2)
        )
        self.attend, self.head = nn.Conv2d(32, 8, 1), nn.Linear(40, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        for branch in self.branches:
            x = torch.relu(x + branch(x))
        attended = torch.softmax(self.attend(x), 1)  # over the channels, so none of these can go
        return self.head(torch.cat([x, attended], 1).mean((2, 3)))


model, images = Net().double().eval(), torch.rand(8, 3, 16, 16, dtype=torch.float64)

# What is connected to what, and why some layers are left alone.  The model is not changed.
graph = sbf.trace(model, images[:1])
print("can be pruned:", {name: layer.filters for name, layer in graph.layers.items()})
print("left alone:", graph.skipped)

# `ignore` leaves layers alone by name; `couple="streams"` has layers that are added up keep the same filters, so
# that the residual stream itself becomes narrower and every layer that reads it does less.
pruner = sbf.Pruner(model, images[:1], budget=sbf.Budget(macs="50%"), constraints=sbf.Constraints(couple="streams"))
norms = {name: dict(model.named_modules())[name].weight.detach().abs().sum((1, 2, 3)) for name in graph.layers}
pruner.rank(norms)
coupled = pruner.plan()
assert coupled.keep["stem"] == coupled.keep["branches.0.0"] == coupled.keep["branches.1.0"]
pruner.detach()

# `round_to` asks for widths that hardware likes, `min_filters` and `max_removed` for what no layer may lose.
pruner = sbf.Pruner(
    model, images[:1], budget=sbf.Budget(macs="50%"), constraints=sbf.Constraints(ignore=["stem"], round_to=4)
)
pruner.rank({name: norms[name] for name in pruner.graph.layers})
assert "stem" not in pruner.plan().keep
assert all(len(kept) % 4 == 0 for kept in pruner.plan().keep.values())

# A plan is plain data: filters by layer, JSON in a file.  Change it, and the gates follow.
keep = dict(pruner.plan().keep) | {"branches.1.0": ()}  # the second branch goes as a whole
pruner.gate(sbf.Plan(keep))
small = pruner.extract()
with torch.no_grad():
    torch.testing.assert_close(small(images), model(images), rtol=0, atol=1e-12)

dense, compact = (sbf.measure(network, images[:1]).macs for network in (model, small))
print("coupled:", coupled.widths(), "by hand:", pruner.plan().widths())
print(f"{compact / dense:.1%} of the MACs left; gated and extracted agree to 1e-12")
