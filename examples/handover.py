"""A network of a certain size, handed over as an ONNX file and as safetensors, and read back from both.

The ONNX file runs without PyTorch and without this package; the folder of `sbf.save` goes on being trained.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import sbf_pruner as sbf
from sbf_pruner.runtimes import run, session, to_onnx

if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
    raise SystemExit(f'this example needs {", ".join(missing)}; run: pip install "sbf-pruner[export]"')

torch.manual_seed(0)


def build():
    """The dense network; whoever reads the folder back needs this function, whoever reads ONNX does not."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


model, images, labels = build(), torch.rand(32, 3, 16, 16), torch.randint(0, 10, (32,))
pruner = sbf.Pruner(model, images[:1], budget=sbf.Budget(macs="30%", size="20kB"), scores=sbf.Scores(speed=0.1))
with pruner.scoring():  # see own_loop.py for all of the training
    for _ in range(10):
        (nn.functional.cross_entropy(model(images), labels) + pruner.penalty()).backward()
        pruner.step()
small = pruner.extract().eval()
dense, compact = (sbf.measure(network, images[:1]) for network in (model, small))

with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    sbf.save(small, folder)  # model.safetensors and plan.json
    size = (Path(folder) / "model.safetensors").stat().st_size
    again = sbf.load(folder, build).eval()
    torch.testing.assert_close(again(images), small(images), rtol=0, atol=0)

    # As it is; docs/export.md tells how to have the form written that is fastest on this machine.
    file = to_onnx(small, images[:1], Path(folder) / "small.onnx")
    (outputs,) = run(session(file, threads=1), images)  # in ONNX Runtime; the batch may have any size
difference = (outputs - small(images).detach()).abs().max().item()
assert difference < 1e-4 and compact.macs <= 0.3 * dense.macs and size <= 20_000

print(f"MACs {dense.macs:,} -> {compact.macs:,}; {size:,} bytes of weights")
print(f"read back, equal bit for bit; in ONNX Runtime it differs by {difference:.0e}")
