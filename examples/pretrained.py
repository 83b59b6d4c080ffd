"""A network of torchvision cut to half of its multiply-accumulates (MACs), then fine-tuned.

Any classifier of torchvision or timm goes the same way.  Nothing is downloaded here, so the weights are random: say
`weights="DEFAULT"` below, or `timm.create_model("resnet18", pretrained=True)`, and give it your own images.
"""

import torch
from torch import nn

import sbf_pruner as sbf

try:
    from torchvision.models import resnet18
except (ImportError, RuntimeError) as error:  # the latter where its build is for another torch
    raise SystemExit(f"this example needs torchvision, which cannot be imported here ({error})") from None

torch.manual_seed(0)
model = resnet18(weights=None, num_classes=10)  # "DEFAULT" for trained weights, with their 1000 classes
images, labels = torch.rand(8, 3, 32, 32), torch.randint(0, 10, (8,))  # in the place of your batches
criterion = nn.CrossEntropyLoss()


def train(network, steps):
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(criterion(network(images), labels))
        losses[-1].backward()
        optimizer.step()
    return losses[0].item(), losses[-1].item()


# With a budget no penalty has to be found: it follows the limit, and the filters land on it from below.
pruner = sbf.Pruner(model, images[:1], budget=sbf.Budget(macs="50%"), scores=sbf.Scores(speed=0.2))
for part_of_the_way in (0.5, 1):
    pruner.progress = part_of_the_way  # the limit closes in from cycle to cycle
    with pruner.scoring(tune=lambda: model(images)):  # norms take their statistics under the scores
        for _ in range(3):
            (criterion(model(images), labels) + pruner.penalty()).backward()
            pruner.step()
    with pruner.gated():
        train(model, steps=2)

small = pruner.extract()
with torch.no_grad():
    gated, extracted = model.eval()(images), small.eval()(images)
difference = ((gated - extracted).abs().max() / gated.abs().max()).item()
dense, compact = (sbf.measure(network, images[:1]) for network in (model, small))
assert difference < 1e-4 and 0.49 < compact.macs / dense.macs <= 0.5
first, last = train(small, steps=4)

print(f"parameters {dense.params:,} -> {compact.params:,}; MACs {dense.macs:,} -> {compact.macs:,}")
print(f"the gated and the extracted network differ by {difference:.0e} of the largest output")
print(f"fine-tuning: loss {first:.2f} -> {last:.2f}")
