"""Save and load pruned networks and check exported folders, without running code from files.

`save` writes the tensors to `model.safetensors` and the filters that each layer keeps to `plan.json`; `load` builds
the dense network, applies the plans and loads the tensors. The checksummed header of `model.safetensors` contains
the plans of all extractions in order, and the shapes and dtypes of the example inputs. The manifest `export.json`
detects damaged files, not a folder forged together with it. A crafted file can make `torch.export.load` unpickle
objects, evaluate code and load libraries, so `read_program` gives it a new archive with raw tensors and listed
operators only.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .budget.file_size import FORMAT, contents, wiring
from .errors import PruningError, RunError, VersionError, check_version
from .plan import Plan
from .surgery.extract import extract
from .utils.files import atomic_path, from_plain, read_tensors, read_text, write_tensors, write_text
from .utils.user_model import check_model, pruner_hooks

MODEL, PLAN, PROGRAM = "model.safetensors", "plan.json", "network.pt2"
_INPUTS = "give the inputs it was pruned with: load(folder, build, example_inputs)"


def save(model: nn.Module, folder: str | Path) -> None:
    """Save a network returned by `extract`, or any other module, to a folder; raise a PruningError if it is gated.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> small = extract(net, torch.rand(1, 3, 16, 16), Plan({"0": [0, 5]}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(small, folder)
    ...     again = load(folder, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    >>> torch.equal(again[2].weight, small[2].weight)
    True
    """
    check_model(model)
    if any(pruner_hooks(model)):
        raise PruningError("the model is gated and still has all its filters; save what pruner.extract() gives")
    write_tensors(Path(folder) / MODEL, *contents(model))
    write_text(Path(folder) / PLAN, reduce(Plan.then, getattr(model, "sbf_plans", ()), Plan({})).to_json())


def load(folder: str | Path, build: Callable[[], nn.Module] | None = None, example_inputs: Any = None) -> nn.Module:
    """Load a network from a run folder, an exported folder, or a folder that `save` wrote.

    `build` returns the dense network. Without it, an exported folder is loaded from `network.pt2`, in evaluation
    mode and not trainable. No code from a file is run.

    The dense network is traced again, on zeros, to apply the plans. If its control flow depends on input values,
    pass the `example_inputs` that it was pruned with.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; give the folder of a run or an export, or one that save wrote")
    exported = (path / MANIFEST).is_file()
    if build is None:
        if not exported:
            raise RunError(
                f"{path} is no exported folder; give the function that builds the dense network as well: "
                "load(folder, build)"
            )
        check_files(path, [PROGRAM])
        return read_program(path / PROGRAM)
    if isinstance(build, nn.Module):  # A module is callable as well, but builds nothing.
        raise RunError(
            "build is a network already; give the function that builds the dense one: load(folder, build)"
        )
    if exported:
        check_files(path, [MODEL, PLAN])
    remedy = "write it again with sbf_pruner.save"
    if (path / "recipe.toml").is_file():
        remedy = "remove summary.json from the run's folder, and --resume to write it anew"
    tensors, written = read_tensors(path / MODEL, remedy)
    check_version(written.get("format"), FORMAT, path / MODEL)
    if written.get("format") != FORMAT:
        raise RunError(f"{path / MODEL} is no saved network of this version ({FORMAT}); {remedy}")
    plans = [Plan(keep) for keep in written["plans"]]
    _check_plan(path / PLAN, reduce(Plan.then, plans, Plan({})), remedy)
    model = build()
    if not isinstance(model, nn.Module):
        raise RunError(f"build() returned {type(model).__name__}; give a function that builds the dense network")

    def zeros(described: dict[str, Any]) -> Tensor:
        first = next(model.parameters())
        dtype: torch.dtype = getattr(torch, described["dtype"])
        dtype = first.dtype if dtype.is_floating_point else dtype
        return torch.zeros(described["shape"], dtype=dtype, device=first.device)

    inputs = from_plain(written["inputs"], zeros) if example_inputs is None else example_inputs
    for plan in plans:
        try:
            model = extract(model, inputs, plan)
        except PruningError as error:
            if example_inputs is not None:
                raise
            reason = str(error).partition("; ")[0]
            raise RunError(
                f"{path / MODEL}: the network that build() makes cannot be pruned when traced with zeros ({reason})"
                f"; build the one that was pruned, or, if its control flow depends on input values, {_INPUTS}"
            ) from error
    _fill(model, tensors, path / MODEL)
    if written.get("wiring", wiring(model)) != wiring(model):
        raise RunError(
            f"{path / MODEL}: tracing with zeros gives another channel structure than when it was pruned; {_INPUTS}"
        )
    return model


def _check_plan(path: Path, expected: Plan, remedy: str) -> None:
    try:
        found = Plan.load(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from error
    except VersionError:
        raise
    except PruningError as error:
        raise RunError(f"{path} is damaged ({str(error).partition('; ')[0]}); {remedy}") from error
    if found != expected:
        raise RunError(f"{path} and {MODEL} do not belong together; put back the file that was changed")


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy the tensors into the model, in the dtypes they were saved in."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    odd = [name for name in [*state, *tensors] if name not in state or name not in tensors]
    odd = odd or [name for name in state if state[name].shape != tensors[name].shape]
    if odd:
        raise RunError(
            f"{path} does not fit the network that build() makes, first at {odd[0]!r}; build the same dense "
            "network, with the same options, as the one that was pruned"
        )
    for name, tensor in state.items():
        tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


MANIFEST = "export.json"
MANIFEST_FORMAT = "sbf-pruner export 1"
# All files that an export may write. `--force` removes no others, whatever a manifest lists.
FILES = ("network.onnx", "network-int8.onnx", PROGRAM, MODEL, PLAN, "recipe.toml", "README.md")
_EXPORT_AGAIN = "export the run again with: sbf export RUN --force"
# Remedy for a folder that --force cannot replace.
_ANEW = "export the run into another folder with: sbf export RUN --to DIR"


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of all files in a folder together with `facts`, and return it."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)} for name in names}
    manifest = {"format": MANIFEST_FORMAT, **facts, "files": files}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an exported folder; raise a RunError if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text(path))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; {_ANEW}") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged; {_ANEW}") from error
    if isinstance(manifest, dict):
        check_version(manifest.get("format"), MANIFEST_FORMAT, path)
    known = isinstance(manifest, dict) and manifest.get("format") == MANIFEST_FORMAT
    if not known or not isinstance(manifest.get("files"), dict):
        raise RunError(f"{path} is no manifest of this version ({MANIFEST_FORMAT}); {_ANEW}")
    return manifest


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Check the named files of an exported folder; raise a RunError if one differs from the manifest."""
    files = read_manifest(folder)["files"]
    for name in names:
        path, stated = folder / name, files.get(name)
        if stated is None:
            raise RunError(f"{folder} was exported without {name} (it holds {', '.join(files)}); {_EXPORT_AGAIN}")
        if not path.is_file():
            raise RunError(f"{path} is missing; {_EXPORT_AGAIN}")
        if path.stat().st_size != stated["bytes"] or digest(path) != stated["sha256"]:
            raise RunError(f"{path} is not the file that was exported (its checksum differs); {_EXPORT_AGAIN}")


def exported_files(folder: Path, shown: Path) -> list[Path]:
    """Return the files of an exported folder, the manifest last; raise a RunError if it contains any other file.

    `shown` is the name of the folder in messages.
    """
    written = [*read_manifest(folder)["files"], MANIFEST]
    found = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
    for path in found:
        ours = path.name in written and path.name in (*FILES, MANIFEST)
        if not ours or path.is_symlink() or not path.is_file():
            raise RunError(
                f"{shown / path.name} was not written by an export, and {shown} is not replaced; move it "
                "elsewhere, or name another folder (--to)"
            )
    return found


def remove_export(folder: Path) -> None:
    """Remove the exported files that a manifest lists, then the folder if empty; without a manifest, nothing."""
    try:
        manifest = read_manifest(folder)
    except RunError:
        return
    for name in (*FILES, MANIFEST):  # The manifest is removed last, because it lists the others.
        path = folder / name
        if (name in manifest["files"] or name == MANIFEST) and path.is_file() and not path.is_symlink():
            path.unlink()
    with suppress(OSError):  # It fails if the folder still contains files of the user.
        folder.rmdir()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_RECORD = re.compile(
    r"archive_format|archive_version|byteorder|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|models/model\.json|data/sample_inputs/model\.pt"
)
_BOOKKEEPING = re.compile(r"\.data/(version|serialization_id)|version|\.format_version|\.storage_alignment")
_NAME = re.compile(r"[A-Za-z0-9_.]{0,500}")
_VERSION = re.compile(r"[A-Za-z0-9_.+]{1,80}")
# ATen operators that a network may use. None reads or writes files, and each checks sizes and indices before it
# accesses memory. Backward operators and the `upsample` overloads with both scales and a size do not check, and a
# truncating division of integers may abort the process, so these are not listed.
_ALLOWED = """
conv1d conv2d conv2d.padding conv1d.padding conv3d conv3d.padding conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution linear matmul mm bmm addmm baddbmm mv dot vdot outer einsum
gru.input rnn_tanh.input rnn_relu.input embedding one_hot
batch_norm instance_norm group_norm layer_norm rms_norm linalg_vector_norm norm.ScalarOpt_dim
relu relu_ relu6 relu6_ leaky_relu leaky_relu_ prelu elu elu_ selu selu_ celu celu_ gelu gelu_ silu silu_ mish
mish_ hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ sigmoid sigmoid_ tanh tanh_ softplus
log_sigmoid threshold threshold_ hardshrink softshrink softmax.int log_softmax.int _softmax
_log_softmax glu rrelu dropout dropout_ feature_dropout alpha_dropout
add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar rsub.Scalar
rsub.Tensor mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar div.Tensor div.Scalar div_.Tensor div_.Scalar
floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar
fmod.Tensor fmod.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar pow_.Scalar addcmul addcdiv
lerp.Scalar lerp.Tensor neg abs abs_ sign square sqrt sqrt_ rsqrt reciprocal exp exp_ exp2 expm1 log log_ log2
log10 log1p sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf floor ceil round round.decimals
trunc frac clamp clamp.Tensor clamp_ clamp_min clamp_min_ clamp_max clamp_max_ maximum minimum nan_to_num
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor
ge.Scalar logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_not isnan
isinf isfinite where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor
masked_fill_.Scalar masked_fill_.Tensor
mean mean.dim sum sum.dim_IntList prod prod.dim_int amax amin max min max.dim min.dim max.other min.other
argmax argmin any any.dim all all.dim std.dim std.correction var.dim var.correction var_mean.correction
std_mean.correction logsumexp cumsum cumprod topk sort sort.stable argsort
max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d
avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d max_unpool2d max_unpool3d upsample_nearest1d.vec upsample_nearest2d.vec
upsample_nearest3d.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
_upsample_nearest_exact3d.vec upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec
upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec grid_sampler affine_grid_generator
pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle im2col col2im
view _unsafe_view reshape reshape_as view_as flatten.using_ints unflatten.int permute transpose.int t numpy_T
movedim.int movedim.intlist swapaxes squeeze squeeze.dim squeeze.dims squeeze_.dim unsqueeze unsqueeze_ expand
expand_as repeat tile broadcast_to cat stack hstack vstack concat split.Tensor split.sizes split_with_sizes chunk
unsafe_chunk unsafe_split.Tensor tensor_split.sections unbind.int slice.Tensor select.int narrow index.Tensor
index_select gather scatter.src scatter.value scatter_add index_add index_add_ index_put index_put_
slice_scatter select_scatter copy copy_ fill.Scalar fill_.Scalar fill_.Tensor zero_ roll flip rot90
repeat_interleave.self_int unfold diagonal tril triu meshgrid meshgrid.indexing
contiguous clone detach detach_ alias lift_fresh_copy to.dtype to.dtype_layout to.device to.other _to_copy
type_as
zeros ones full eye eye.m arange arange.start arange.start_step linspace scalar_tensor zeros_like ones_like
full_like new_zeros new_ones new_full rand randn rand_like randn_like bernoulli bernoulli.p
sym_size.int sym_numel sym_stride.int _assert_tensor_metadata _assert_scalar _assert_async.msg
sym_constrain_range sym_constrain_range_for_size
"""
_OPERATORS = frozenset(_ALLOWED.split())
_PLAIN_CALLS = {
    *(f"_operator.{name}" for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "le", "ge")),
    *(f"torch.sym_{name}" for name in ("int", "float", "max", "min", "not")),
}
_IN_EXPRESSIONS = (
    "Symbol",
    "Integer",
    "Rational",
    "Add",
    "Mul",
    "Pow",
    "Max",
    "Min",
    "FloorDiv",
    "Mod",
    "CleanDiv",
)
_LONGEST_EXPRESSION = 500  # characters
_MOST_TERMS = 32  # in one expression after multiplying out
# sympy is slow with these operations, so each counts as several terms.
_SLOW_TERMS = {"Max": 8, "Min": 8, "Mod": 8, "FloorDiv": 8, "CleanDiv": 8}
_MOST_EXPRESSIONS = 200  # distinct ones in one file
_SMALL_POWER = re.compile(r"Pow\((Symbol|Integer)\([^()]*\), Integer\(-?[1-4]\)\)")
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_CONTEXT = re.compile(r'null|\[("\w*"(, "\w*")*)?\]')
_DEEPEST = 100  # Programs are nested about ten levels deep.


# Replacements for operators that do not check tensor sizes; `read_program` inserts them into each network.
def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return (torch.batch_norm(x, weight, bias, mean, var, False, momentum, eps, False),)


def _batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return (torch.batch_norm(x, weight, bias, None, None, training, momentum, eps, False),)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _lstm(*given: Any) -> tuple[Tensor, ...]:
    x, state, weights, has_biases, layers, _dropout, _train, bidirectional, batch_first = given
    hidden, width, directions = state[0].shape[-1], x.shape[-1], 1 + bidirectional
    sizes: list[tuple[int, ...]] = []
    for layer in range(layers):
        reads = width if layer == 0 else hidden * directions
        one = [(4 * hidden, reads), (4 * hidden, hidden), *[(4 * hidden,)] * (2 * has_biases)]
        sizes += one * directions
    states = (layers * directions, x.shape[0 if batch_first else 1], hidden)
    if [tuple(w.shape) for w in weights] != sizes or {tuple(s.shape) for s in state} != {states} or x.dim() != 3:
        raise RuntimeError("the weights or states of an LSTM do not fit its input")
    return torch.lstm(*given)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *given: Any, **options: Any
) -> Tensor:
    heads = -3 if options.get("enable_gqa") else -2  # grouped queries have more heads than keys and values
    agree = key.shape[:-1] == value.shape[:-1] and query.shape[:heads] == key.shape[:heads]
    scores = (*query.shape[:-1], key.shape[-2])
    if agree and attn_mask is not None:
        agree = torch.broadcast_shapes(attn_mask.shape, scores) == scores
    if not agree or query.shape[-1] != key.shape[-1]:
        raise RuntimeError("query, key, value and mask of an attention do not fit each other")
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *given, **options)


_CHECKED = {
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm_without_statistics,
    "_weight_norm": _weight_norm,
    "lstm.input": _lstm,
    "scaled_dot_product_attention": _attention,
}


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write an exported program atomically, without example inputs and the node metadata that contains local paths.

    Raise a RunError and write nothing if `read_program` would refuse the program.
    """
    program.example_inputs = None  # torch.export.save would pickle them.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for note in [key for key in node.meta if key not in ("val", "tensor_meta")]:
                del node.meta[note]
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, buffer)
    try:
        _records(buffer.getvalue(), path)
    except _Refused as error:
        raise RunError(
            f"{path.name} is not written, because it could not be read back safely: {error.reason}; leave that "
            "format out (--formats)"
        ) from error
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def read_program(path: Path) -> nn.Module:
    """Load the network that `write_program` wrote, in evaluation mode, without running code from the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror or error}); export the run again") from error
    records = _records(content, path)
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, record in records.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    buffer.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = torch.export.load(buffer).module()
        for node in network.graph.nodes:
            name = _aten_name(f"torch.ops.{node.target}")
            if node.op == "call_function" and name in _CHECKED:
                node.target = _CHECKED[name]
        network.recompile()
        return network
    except Exception as error:
        written = json.loads(records["models/model.json"]).get("torch_version", "another version")
        raise RunError(
            f"{path}, written by torch {written}, cannot be read by torch {torch.__version__} "
            f"({type(error).__name__}); use the ONNX file, or give the model's function: sbf.load(folder, build)"
        ) from error


class _Refused(RunError):
    """Error for an archive with contents that no network needs."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not read, because {reason}; nothing in it was run")
        self.reason = reason


def _records(content: bytes, path: Path) -> dict[str, bytes]:
    """Return the records of an archive that a network needs; raise `_Refused` if there are any others."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            # torch does not compress; refusing compression bounds the bytes read by the size of the file.
            packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if packed or sum(member.file_size for member in members) > len(content):
                raise _Refused(path, "it is compressed")
            # Names are relative to the archive's single folder.
            found = [(member.filename.partition("/")[2], archive.read(member)) for member in members]
    except _Refused:
        raise
    except Exception as error:  # Damaged archives raise many types of errors.
        raise RunError(f"{path} is damaged or cut short ({error}); export the run again") from error
    records = {name: data for name, data in found if not _BOOKKEEPING.fullmatch(name)}
    strange = [name for name, _ in found if not (_RECORD.fullmatch(name) or _BOOKKEEPING.fullmatch(name))]
    if strange:
        raise _Refused(path, f"it holds {strange[0]!r}, which no network needs")
    if len({name for name, _ in found}) < len(found):
        raise _Refused(path, "it holds two files of the same name")
    if records.get("data/sample_inputs/model.pt"):
        raise _Refused(path, "it holds pickled inputs")
    for config in ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json"):
        tensors = _parsed(records, config, path).get("config", {})
        if not isinstance(tensors, dict):
            raise _Refused(path, f"its {config.rpartition('/')[2]} lists no tensors")
        for name, entry in tensors.items():
            pickled = not isinstance(entry, Mapping) or entry.get("use_pickle") is not False
            if pickled or not _NAME.fullmatch(name) or not re.fullmatch(r"\w+", str(entry.get("path_name"))):
                raise _Refused(path, f"its tensor {name!r} is pickled")
    try:
        _check(_parsed(records, "models/model.json", path), set())
    except ValueError as error:
        raise _Refused(path, str(error)) from error
    return records


def _parsed(records: Mapping[str, bytes], name: str, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(records[name])
        if isinstance(parsed, dict):
            return parsed
    except (KeyError, ValueError, RecursionError):
        pass
    raise RunError(f"{path} has no readable {name}; export the run again")


def _check(value: Any, expressions: set[str], key: str = "", depth: int = 0) -> None:
    """Raise a ValueError, naming the key, if a string anywhere in the program has an unexpected form.

    `expressions` collects the distinct size expressions, whose number is limited.
    """
    if depth > _DEEPEST:
        raise ValueError("it is nested deeper than any network")
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} in it is not a valid name")
            if name in ("metadata", "guards_code", "custom_obj_values", "extra_files") and inner:
                raise ValueError(f"it has {name}, which no network needs")
            _check(inner, expressions, name, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, expressions, key, depth + 1)
    elif isinstance(value, str):
        if key == "expr_str":
            expressions.add(value)
            if len(expressions) > _MOST_EXPRESSIONS:
                raise ValueError(f"it has more than {_MOST_EXPRESSIONS} expressions")
        if not _STRINGS.get(key, _NAME.fullmatch)(value):
            if key == "target":
                raise ValueError(f"{value[:80]!r} is not one of the allowed operators")
            raise ValueError(f"its {key or 'text'} is {value[:60]!r}")


def _aten_name(text: str) -> str:
    """Return the name of an ATen operator as listed above, or "" for any other name.

    >>> _aten_name("torch.ops.aten.relu.default"), _aten_name("torch.ops.aten.add.Tensor"), _aten_name("os.system")
    ('relu', 'add.Tensor', '')
    """
    space = "torch.ops.aten."
    return text.removeprefix(space).removesuffix(".default") if text.startswith(space) else ""


def _is_expression(text: str) -> bool:
    """Return True for arithmetic on sizes, as sympy prints it, that is small enough to evaluate quickly."""
    if len(text) > _LONGEST_EXPRESSION:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return all(map(_is_arithmetic, ast.walk(tree))) and _terms(tree) <= _MOST_TERMS


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _IN_EXPRESSIONS
    if isinstance(node, ast.Name):
        return bool(re.fullmatch(r"[A-Za-z]\w{0,40}", node.id))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | str) and bool(re.fullmatch(r"-?\w{1,40}", str(node.value)))
    return isinstance(node, ast.Expression | ast.keyword | ast.Load | ast.UnaryOp | ast.USub)


def _terms(node: ast.AST) -> float:
    """Count the terms of an expression after multiplying out; return infinity for a power that may be huge.

    >>> _terms(ast.parse("Mul(Add(Symbol('a'), Symbol('b')), Add(Symbol('c'), Integer(1)))"))
    4
    >>> _terms(ast.parse("Pow(Integer(99999999), Integer(99999999))"))
    inf
    """
    if not isinstance(node, ast.Call):
        return max(map(_terms, ast.iter_child_nodes(node)), default=1)
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    if kind == "Pow":
        return 1 if _SMALL_POWER.fullmatch(ast.unparse(node)) else math.inf
    terms = list(map(_terms, node.args))
    return math.prod(terms) if kind == "Mul" else sum(terms) + _SLOW_TERMS.get(kind, 0)


def _is_spec(text: str) -> bool:
    """Return True for a serialized pytree spec of tuples, lists and dicts."""
    try:
        spec = json.loads(text)
        return isinstance(spec, list) and len(spec) == 2 and isinstance(spec[0], int) and _is_nest(spec[1])
    except (ValueError, RecursionError):
        return False


def _is_nest(tree: Any) -> bool:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"}:
        return False
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if context is not None and not (isinstance(context, str) and _CONTEXT.fullmatch(context)):
        return False
    return kind in _CONTAINERS and isinstance(children, list) and all(map(_is_nest, children))


# Checks of strings by their key in the program; strings under other keys have to be names.
_STRINGS: dict[str, Callable[[str], object]] = {
    "target": lambda text: text in _PLAIN_CALLS or _aten_name(text) in {*_OPERATORS, *_CHECKED},
    "expr_str": _is_expression,
    "in_spec": _is_spec,
    "out_spec": _is_spec,
    "torch_version": _VERSION.fullmatch,
}
