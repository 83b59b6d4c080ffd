"""The networks of torchvision and timm that the benchmarks run on, ready to be compared in float64.

A name ("torchvision:resnet18") enters; a network and an input for it leave.  What holds: weights are random
but nothing hides behind a zero or a one (norm statistics and scales, layer scales and biases are all drawn),
activations stay near 1 in size, the image is the smallest the network runs on in both modes, and building
takes no time for initialisation that is thrown away.

`run` does some work on many networks, each in a process of its own, and saves the results as they come: a model
that crashes, hangs or eats the memory costs its own row only, a run that is cut short goes on where it stopped,
and all models of a run see the source as it was at its start.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import multiprocessing
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

import sbf_pruner
from saving import RESULTS, save_result

# What the plain convolutional families are called in the two zoos; a later match wins.
FAMILIES = {
    "ResNet": ("resnet", "wide_resnet", "seresnet", "resnetv2", "resnetaa", "resnetblur", "resnetrs"),
    "ResNeXt": ("resnext", "seresnext", "legacy_seresnext"),
    "VGG": ("vgg",),
    "DenseNet": ("densenet",),
    "MobileNet": ("mobilenet", "mnasnet", "fbnetc", "hardcorenas", "lcnet", "tinynet"),
    "EfficientNet": ("efficientnet", "tf_efficientnet", "mixnet"),
    "RegNet": ("regnet",),
    "Inception": ("inception_v", "inception_resnet", "googlenet"),
    "CSP": ("csp", "cs3"),
    "Res2Net": ("res2net", "res2next"),
    "DLA": ("dla",),
    "HRNet": ("hrnet",),
    "RepVGG": ("repvgg",),
    "GhostNet": ("ghostnet",),
    "ShuffleNet": ("shufflenet",),
}

TIMM = """
    resnet26d resnet32ts resnet50_gn resnetaa50 resnetblur18 resnetrs50 resnetv2_50 resnetv2_50x1_bit
    seresnext26t_32x4d legacy_seresnext26_32x4d ecaresnet26t gcresnext26ts skresnet18 skresnext50_32x4d
    resnest14d resnest50d_1s4x24d tresnet_m nf_resnet26 nf_regnet_b0 dm_nfnet_f0 eca_nfnet_l0
    densenetblur121d rdnet_tiny dpn68 vovnet39a ese_vovnet19b_dw hgnet_tiny hgnetv2_b0 selecsls42
    cspresnet50 cspresnext50 cspdarknet53 cs3darknet_focus_s cs3sedarknet_l darknet53 res2net50_26w_4s res2next50
    dla34 dla60 dla60_res2net hrnet_w18_small hrnet_w18 repvgg_a0 repvgg_b1g4 mobileone_s0 repvit_m0_9 fastvit_t8
    mobilenetv1_100 mobilenetv2_050 mobilenetv3_small_100 mobilenetv4_conv_small mobilenetv4_hybrid_medium
    mnasnet_small fbnetc_100 hardcorenas_a lcnet_050 tinynet_e rexnet_100 mixnet_s
    tf_efficientnet_b0 efficientnetv2_rw_t efficientnet_es efficientnet_lite0 efficientnet_cc_b0_4e
    efficientnet_b0_gn
    ghostnet_100 ghostnetv2_100 repghostnet_050 regnetx_002 regnety_002 regnetz_b16 gernet_s
    inception_v4 inception_resnet_v2 inception_next_atto xception41 xception41p legacy_xception
    nasnetalarge pnasnet5large convmixer_768_32 poolformer_s12 convnext_atto convnextv2_atto convformer_s18
    starnet_s1 fasternet_t0 mambaout_femto focalnet_tiny_srf
    botnet26t_256 halonet26t lambda_resnet26t bat_resnext26ts
    coatnet_pico_rw_224 maxvit_pico_rw_256 maxxvit_rmlp_nano_rw_256 edgenext_xx_small mobilevit_xxs mobilevitv2_050
    efficientformer_l1 efficientformerv2_s0 efficientvit_b0 efficientvit_m0 levit_conv_128s visformer_tiny
    pit_ti_224 pvt_v2_b0 swin_tiny_patch4_window7_224 vit_tiny_patch16_224 vit_small_resnet26d_224 swiftformer_xs
    davit_tiny nextvit_small
""".split()  # noqa: SIM905

SIZES = (64, 96, 128, 160, 224, 256, 299, 331)
# Networks that need some gigabytes each, to be run alone.
LARGE = ("torchvision:vit_h_14", "torchvision:regnet_y_128gf", "torchvision:vit_l_16", "torchvision:vit_l_32")
_KEPT: list[Any] = []


@cache
def torchvision() -> ModuleType:
    """torchvision, also where only its CUDA build is to be had, whose operators then do not load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision.models.segmentation
        except RuntimeError:  # operator torchvision::nms does not exist
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(library)  # the definitions go when it does
            import torchvision.models.segmentation
    return torchvision


@cache
def timm() -> ModuleType:
    torchvision()  # timm imports it
    import timm

    return timm


def names() -> list[str]:
    """Every network of the run: timm's, then torchvision's classifiers and segmentation networks."""
    models = torchvision().models
    found = [*models.list_models(module=models), *models.list_models(module=models.segmentation)]
    return [f"timm:{n}" for n in TIMM] + [f"torchvision:{n}" for n in found]


def family(name: str) -> str:
    """The plain convolutional family a network belongs to, or ""."""
    inner = name.partition(":")[2]
    return next((f for f, starts in FAMILIES.items() if inner.startswith(starts)), "")


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The network with random numbers in it, in evaluation mode, and two images for it."""
    torch.manual_seed(seed)
    library, _, inner = name.partition(":")
    with _uninitialised():
        model = _from_torchvision(inner) if library == "torchvision" else timm().create_model(inner)
    _draw(model)
    size = _smallest_size(model, inner)
    model = model.to(dtype)
    images = torch.randn(2, 3, size, size, dtype=dtype)
    _calibrate(model, images)
    for parameter in model.parameters():
        parameter.grad = None
    return model.eval(), images


def _from_torchvision(inner: str) -> nn.Module:
    options: dict[str, Any] = {"weights": None}
    segmentation = torchvision().models.list_models(module=torchvision().models.segmentation)
    if inner in segmentation:
        options["weights_backbone"] = None
        if inner.startswith("fcn"):
            options["aux_loss"] = True
    elif inner in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # its own way is minutes of scipy
    elif inner.startswith("vit_"):
        options["image_size"] = 56 if inner == "vit_h_14" else 64
    return torchvision().models.get_model(inner, **options)


class _Skip(TorchFunctionMode):
    """Leave new tensors as the allocator gives them, or at zero.

    (torch cuts a normal distribution off by drawing again until all is inside, which garbage might never be.)
    """

    NAMES = frozenset(
        (
            *("normal_", "uniform_", "trunc_normal_", "erfinv_", "orthogonal_"),
            *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            tensor = args[0] if args else kwargs["tensor"]
            if name == "normal_":
                tensor.detach().zero_()
            return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def _uninitialised() -> Iterator[None]:
    with _Skip(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        scale = name.rpartition(".")[2] not in ("bias", "bias_k", "bias_v") and parameter.squeeze().dim() <= 1
        if scale:  # of norms and layer scales
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() <= 1:
            parameter.normal_(0, 0.2)
        else:
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            parameter.normal_(0, math.sqrt(1.5 / fan_in))


def _smallest_size(model: nn.Module, inner: str) -> int:
    """The first size on which the network runs in evaluation and in training mode."""
    if inner.startswith("vit_") and hasattr(model, "image_size"):
        return int(model.image_size)  # type: ignore[arg-type]
    own = (getattr(model, "default_cfg", None) or {}).get("input_size", (3, 224, 224))[-1]
    fixed = (getattr(model, "default_cfg", None) or {}).get("fixed_input_size", False)
    before = copy.deepcopy(dict(model.named_buffers()))
    try:
        for size in [own] if fixed else [s for s in SIZES if s < own] + [own, 299]:
            try:
                with torch.no_grad():
                    model.eval()(torch.zeros(2, 3, size, size))
                    model.train()(torch.zeros(2, 3, size, size))
            except Exception:  # a network that is too deep for the image may fail in any way
                continue
            return size
    finally:
        for name, buffer in model.named_buffers():
            buffer.data = before[name]
    raise RuntimeError(f"{inner} runs on no image of {SIZES} in both modes")


@torch.no_grad()
def _calibrate(model: nn.Module, images: Tensor) -> None:
    """Set the statistics of batch norms to about what they see, so that activations stay near 1 in size."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.register_forward_pre_hook(_set_statistics)
    model.eval()(images)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for key in [k for k, hook in module._forward_pre_hooks.items() if hook is _set_statistics]:
                del module._forward_pre_hooks[key]


def _set_statistics(norm: nn.Module, inputs: tuple[Tensor]) -> None:
    assert isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None
    seen = inputs[0].transpose(0, 1).flatten(1)
    around = seen.var(1, correction=0).mean() + 1e-3
    norm.running_mean.copy_(seen.mean(1)).mul_(torch.empty_like(norm.running_mean).uniform_(0.7, 1.3))
    norm.running_var.copy_(seen.var(1, correction=0) * 0.5 + around * 0.5)
    norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.7, 1.4))


# -- one process per model --------------------------------------------------------------------------------

Row = dict[str, Any]
# The parts of the package whose change can change a result.
PARTS = (
    "graph",
    "surgery",
    "scores",
    "plan",
    "modules",
    "errors",
    "pruner",
    "measurement/counts",
    "utils/user_model",
)
MEMORY = 18 * 2**30
_forked = multiprocessing.get_context("fork")  # libraries are imported once


def source_version() -> str:
    """A short hash of the source that the results depend on."""
    package = Path(sbf_pruner.__file__).parent
    files = [p for part in PARTS for p in (sorted((package / part).rglob("*.py")) or [package / f"{part}.py"])]
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in files)).hexdigest()[:12]


def arguments(about: str, timeout: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these models, or else all whose name contains one"
    )
    parser.add_argument("--missing", action="store_true", help="models without a result")
    parser.add_argument("--stale", action="store_true", help="models without a result of the present source")
    parser.add_argument("--failed", action="store_true", help="models whose last result is a failure")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--timeout", type=int, default=timeout, help="seconds for one model")
    parser.add_argument("--list", action="store_true", help="print the models, and do nothing")
    return parser.parse_args()


def read(benchmark: str) -> dict[str, Row]:
    path = RESULTS / f"{benchmark}.json"
    return json.loads(path.read_text("utf-8"))["models"] if path.exists() else {}


def chosen(names: list[str], held: Mapping[str, Row], options: argparse.Namespace) -> list[str]:
    if options.only:
        exact = [n for n in names if {n, n.partition(":")[2]} & {*options.only}]
        unknown = [o for o in options.only if not any(o in n for n in names)]
        if unknown:
            raise SystemExit(f"no model is called {unknown[0]!r}; see --list")
        names = exact or [n for n in names if any(o in n for o in options.only)]
    if options.missing:
        names = [n for n in names if n not in held]
    if options.stale:
        version = source_version()
        names = [n for n in names if held.get(n, {}).get("source") != version]
    if options.failed:
        names = [n for n in names if n in held and not held[n]["ok"]]
    return names


def begin(
    benchmark: str,
    about: str,
    timeout: int,
    work: Callable[[str], Row],
    summary: Callable[[dict[str, Row]], Row],
    line: Callable[[str, Row], str],
) -> Row | None:
    """A benchmark's whole command: run what the words ask for, and give the summary of all rows held."""
    options = arguments(about, timeout=timeout)
    torch.set_num_threads(1)
    timm()
    if options.list:
        print("\n".join(names()))
        return None
    todo = chosen(names(), read(benchmark), options)
    print(f"{len(todo)} models")
    return summary(run(benchmark, todo, work, options, summary, line, alone=LARGE))


def run(
    benchmark: str,
    names: list[str],
    work: Callable[[str], Row],
    options: argparse.Namespace,
    summary: Callable[[dict[str, Row]], Row],
    line: Callable[[str, Row], str],
    alone: tuple[str, ...] = (),
) -> dict[str, Row]:
    """Run `work` on the names, save and print each row as it comes, and return all rows held."""
    version, todo = source_version(), [n for n in names if n not in alone]
    going: dict[Connection, tuple[str, multiprocessing.process.BaseProcess, float]] = {}
    for queue, jobs in ((todo, options.jobs), ([n for n in names if n in alone], 1)):
        while queue or going:
            while queue and len(going) < jobs:
                name = queue.pop(0)
                mine, theirs = _forked.Pipe(duplex=False)
                process = _forked.Process(target=_child, args=(work, name, theirs), daemon=True)
                process.start()
                theirs.close()
                going[mine] = name, process, time.monotonic()
            for pipe in {*wait(list(going), timeout=1), *_late(going, options.timeout)}:
                assert isinstance(pipe, Connection)
                name, process, start = going.pop(pipe)
                row = _received(pipe, process, options.timeout)
                row |= {"source": version, "total_seconds": round(time.monotonic() - start, 1)}
                held = read(benchmark) | {name: row}
                save_result(benchmark, {"summary": summary(held), "models": dict(sorted(held.items()))})
                print(line(name, row), flush=True)
    return read(benchmark)


def _late(going: Mapping[Connection, tuple[Any, Any, float]], timeout: int) -> list[Connection]:
    return [pipe for pipe, (_, _, start) in going.items() if time.monotonic() - start > timeout]


def _child(work: Callable[[str], Row], name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        row = work(name)
    except BaseException as error:
        row = {"ok": False, "error": _said(error), "traceback": traceback.format_exc()[-3000:]}
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    pipe.send(row)


def _received(pipe: Connection, process: multiprocessing.process.BaseProcess, timeout: int) -> Row:
    try:
        row: Row = pipe.recv() if pipe.poll() else {"ok": False, "error": f"not done after {timeout} s"}
    except EOFError:
        process.join()
        row = {"ok": False, "error": f"the process ended with {process.exitcode}"}
    pipe.close()
    process.kill()
    process.join()
    return row


def _said(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[-1] if said[-1] else said[0]}"[:400]
