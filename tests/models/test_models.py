"""The bundled networks have the counts the literature quotes, and every bad name is answered by a repair."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sbf_pruner.errors import PruningError
from sbf_pruner.models import BUNDLED, Shortcut, resolve


def counts(name: str, size: int = 32, **options: object) -> tuple[int, int]:
    with torch.device("meta"):
        model = resolve(name, **options).eval()
        image = torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        model(image)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("resnet20", 269_722, 40_551_040),
        ("resnet56", 853_018, 125_485_696),
        ("resnet110", 1_727_962, 252_887_680),
        ("vgg16_bn", 14_724_042, 313_201_664),
    ],
)
def test_dense_counts(name: str, parameters: int, macs: int) -> None:
    assert counts(name) == (parameters, macs)


def test_mobilenet_has_the_originals_widths() -> None:
    # The ImageNet network has 3,504,872 parameters, 1,281,000 of them in its classifier of 1000 classes.
    assert counts("mobilenet_v2")[0] == 3_504_872 - 1_281_000 + 1_281 * 10
    assert counts("mobilenet_v2", width_mult=0.5)[1] < counts("mobilenet_v2")[1] / 2


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("size", [8, 32])
def test_every_network_takes_both_sizes_and_its_options(name: str, size: int) -> None:
    options = {"image_size": size} if name == "vgg16_bn" else {}
    with torch.device("meta"):
        model = resolve(name, num_classes=7, in_channels=1, **options)
        assert model(torch.empty(2, 1, size, size)).shape == (2, 7)


def test_a_network_of_depth_n_has_n_weight_layers() -> None:
    for depth in (20, 32, 44, 56, 110):
        with torch.device("meta"):
            model = resolve(f"resnet{depth}")
        assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth


def test_shortcut_subsamples_and_pads_with_zeros() -> None:
    x = torch.randn(2, 4, 6, 6)
    out = Shortcut(4)(x)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any() and not out[:, 6:].any()


def test_start_keeps_the_scale_and_follows_the_seed() -> None:
    torch.manual_seed(0)
    first = resolve("resnet20")
    weight = first.layer3[2].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    torch.manual_seed(0)
    again = resolve("resnet20").state_dict()
    for key, value in first.state_dict().items():
        torch.testing.assert_close(value, again[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet65",
            {},
            r"no bundled model is called 'resnet65' .*package.module:callable.*; did you mean 'resnet56'\?",
        ),
        (
            "zzz",
            {},
            r"no bundled model is called 'zzz' \(a model of your own .*\); known: resnet20, .*mobilenet_v2$",
        ),
        ("timm:", {}, r"'timm:' is not a complete name; write torchvision:NAME, timm:NAME or package.module:call"),
        (":net", {}, r"':net' is not a complete name"),
        ("resnet20", {"num_clases": 3}, r"resnet20 has no option 'num_clases'; did you mean 'num_classes'\?"),
        ("resnet20", {"num_classes": "ten"}, r"resnet20 could not be built with num_classes='ten': at "),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(PruningError, match=message):
        resolve(name, **options)


OWN = """
from torch import nn
def plain(): return nn.Linear(4, 2)
def sized(num_classes, width=4): return nn.Linear(width, num_classes)
def anything(**options): return nn.Linear(options["in_channels"], options["num_classes"])
def wrong(): return {"a": 1}
def lame(): return nn.Conv2d(3, 5, 3, groups=2)
class Net(nn.Module):
    @classmethod
    def small(cls): return cls()
built = nn.Linear(4, 2)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module in the current directory, which is not on sys.path."""
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "broken_networks.py").write_text("1 / 0")
    (tmp_path / "lacking_networks.py").write_text("import no_such_package_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    yield "own_networks"
    for name in ("own_networks", "broken_networks", "lacking_networks"):
        sys.modules.pop(name, None)


def test_own_callables_get_the_offers_they_name(own: str) -> None:
    before = list(sys.path)
    offers = {"num_classes": 5, "in_channels": 3}
    assert resolve("own_networks:plain", **offers).out_features == 2
    assert resolve("own_networks:sized", **offers).out_features == 5
    assert resolve("own_networks:sized", **offers, width=9).in_features == 9
    assert resolve("own_networks:anything", **offers).in_features == 3
    assert type(resolve("own_networks:Net.small")).__name__ == "Net"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_networks:plian", r"own_networks:plian: own_networks has no 'plian'; did you mean 'plain'\?"),
        ("own_networks:Net.big", r"own_networks:Net.big: own_networks has no 'Net.big'; "),
        (
            "own_networks:lame",
            r"own_networks:lame could not be built with no options: at own_networks.py:7 \(`def lame.*`\) "
            r"ValueError: in_channels must be divisible by groups$",
        ),
        (
            "own_networks:sized",
            r"^own_networks:sized could not be built with no options: TypeError: sized\(\) missing 1 required "
            r"positional argument: 'num_classes'; give --option num_classes=VALUE, or model.options in a recipe$",
        ),
        ("own_networks:wrong", r"own_networks:wrong returned an object of type dict, not an nn.Module"),
        ("own_networks:built", r"own_networks:built is a network already built; name the class or a func"),
        ("own_networks:number", r"own_networks:number is of type int, which cannot be called to build a"),
        ("no_such_module:net", r"no_such_module:net: no module named 'no_such_module' in this folder"),
        ("no_such_file.py:net", r"named 'no_such_file' in this folder or .* packages; write no_such_file:net$"),
        (
            "lacking_networks:net",
            r"lacking_networks:net: lacking_networks imports 'no_such_package_at_all', which is not installed",
        ),
        ("broken_networks:net", r"importing broken_networks failed with ZeroDivisionError: division by zero"),
    ],
)
def test_own_callables_that_do_not_work(own: str, name: str, message: str) -> None:
    with pytest.raises(PruningError, match=message):
        resolve(name)


def test_own_callables_refuse_unknown_options(own: str) -> None:
    with pytest.raises(PruningError, match=r"own_networks:sized has no option 'widht'; did you mean 'width'\?"):
        resolve("own_networks:sized", num_classes=5, widht=9)
    with pytest.raises(PruningError, match=r"own_networks:plain has no option 'width'; it takes none"):
        resolve("own_networks:plain", width=9)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_missing_library_names_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"{library}:NAME needs {library}; run: pip install {library}"
    with pytest.raises(PruningError, match=message):
        resolve(f"{library}:resnet18")


def test_torchvision_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def resnet18(*, weights: None = None, **options: int) -> nn.Module:
        return nn.Linear(1, out_features=options.pop("num_classes"), **options)

    models = fake("torchvision.models", list_models=lambda: ["resnet18"], get_model_builder=lambda _: resnet18)
    monkeypatch.setitem(sys.modules, "torchvision", fake("torchvision", models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert resolve("torchvision:resnet18", num_classes=6, in_channels=3).out_features == 6
    with pytest.raises(PruningError, match=r"torchvision has no model 'resnet81'; did you mean 'resnet18'\?"):
        resolve("torchvision:resnet81")
    with pytest.raises(PruningError, match=r"torchvision has no model 'zzz'; it has 1 others"):
        resolve("torchvision:zzz")
    with pytest.raises(PruningError, match=r"torchvision:resnet18 takes images of 3 channels, not 1; wrap it"):
        resolve("torchvision:resnet18", in_channels=1)
    with pytest.raises(PruningError, match=r"torchvision:resnet18 could not be built with num_classes=6, depth=2"):
        resolve("torchvision:resnet18", num_classes=6, depth=2)


def test_timm_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, num_classes: int, in_chans: int) -> nn.Module:
        return nn.Linear(in_chans, num_classes)

    monkeypatch.setitem(
        sys.modules, "timm", fake("timm", list_models=lambda: ["resnet18"], create_model=create_model)
    )
    assert resolve("timm:resnet18.a1_in1k", num_classes=6, in_channels=2).in_features == 2
    with pytest.raises(PruningError, match=r"timm has no model 'resnet81'; did you mean 'resnet18'\?"):
        resolve("timm:resnet81")


def test_a_library_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    message = r"timm is installed but cannot be imported: RuntimeError: operator nms does not exist"
    with pytest.raises(PruningError, match=message):
        resolve("timm:resnet18")


def fake(name: str, **contents: Callable[..., object] | types.ModuleType) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module
