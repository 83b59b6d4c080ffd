"""torch.export's archive (.pt2), written plainly and read without running anything that is in it.

A program enters; an archive leaves that holds raw tensors and one JSON text of ATen operators.  torch's own
reader unpickles whatever an archive asks it to, evaluates its expressions and loads its libraries; so before
torch sees it, the archive is taken apart here, everything in it is compared with the little that a network
needs, and torch is given a new archive of just that.  Anything else is refused by name.
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import RunError
from .files import replacing

_RECORD = re.compile(
    r"archive_format|archive_version|byteorder|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|models/model\.json|data/sample_inputs/model\.pt"
)
_BOOKKEEPING = re.compile(r"\.data/(version|serialization_id)|version|\.format_version|\.storage_alignment")
_NAME = re.compile(r"[A-Za-z0-9_.]{0,500}")
_VERSION = re.compile(r"[A-Za-z0-9_.+]{1,80}")
_OPERATOR = re.compile(r"torch\.ops\.aten\.([A-Za-z0-9_]+)\.[A-Za-z0-9_]+")
_PLAIN_CALLS = {
    *(f"_operator.{name}" for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg", "eq", "le", "ge")),
    *(f"torch.sym_{name}" for name in ("int", "float", "max", "min", "not")),
}
_IN_EXPRESSIONS = {
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
}
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_LIMIT = 2**34  # bytes of one archive, unpacked
_DEEPEST = 100  # a program is nested about ten deep


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write an exported program without its notes, which name folders of this machine, in one step."""
    program.example_inputs = None  # they would be pickled
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for note in [key for key in node.meta if key not in ("val", "tensor_meta")]:
                del node.meta[note]
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, buffer)
    _records(buffer.getvalue(), path)  # what cannot be read back is not written
    with replacing(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def read_program(path: Path) -> nn.Module:
    """The network of an archive that `write_program` wrote, in evaluation mode, without running code from it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror or error}); export the run again") from error
    records = _records(content, path)
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, held in records.items():
        writer.write_record(name, held, len(held))
    writer.write_end_of_file()
    buffer.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(buffer).module()
    except Exception as error:
        written = json.loads(records["models/model.json"]).get("torch_version", "another version")
        raise RunError(
            f"{path}, written by torch {written}, cannot be read by torch {torch.__version__} "
            f"({type(error).__name__}); use the ONNX file, or give the model's function: sbf.load(folder, build)"
        ) from error


def _records(content: bytes, path: Path) -> dict[str, bytes]:
    """What is in an archive, if there is nothing in it but what a network needs."""

    def refuse(what: str) -> RunError:
        return RunError(f"{path} is not read, because {what}; nothing in it was run")

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            large = sum(member.file_size for member in members) > _LIMIT
            found = [] if large else [(_inner(member.filename), archive.read(member)) for member in members]
    except Exception as error:  # of many kinds: a name that is no text, a place before the file's beginning
        raise RunError(f"{path} is damaged or cut short ({error}); export the run again") from error
    if large:
        raise refuse("it is too large when unpacked")
    records = {name: held for name, held in found if not _BOOKKEEPING.fullmatch(name)}
    strange = [name for name, _ in found if not (_RECORD.fullmatch(name) or _BOOKKEEPING.fullmatch(name))]
    if strange:
        raise refuse(f"it holds {strange[0]!r}, which no network needs")
    if len({name for name, _ in found}) < len(found):
        raise refuse("it holds two files of the same name")
    if records.get("data/sample_inputs/model.pt"):
        raise refuse("it holds pickled inputs")
    for config in ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json"):
        tensors = _parsed(records, config, path).get("config", {})
        if not isinstance(tensors, dict):
            raise refuse(f"its {config.rpartition('/')[2]} names no tensors")
        for name, entry in tensors.items():
            pickled = not isinstance(entry, Mapping) or entry.get("use_pickle") is not False
            if pickled or not _NAME.fullmatch(name) or not re.fullmatch(r"\w+", str(entry.get("path_name"))):
                raise refuse(f"its tensor {name!r} is pickled")
    try:
        _check(_parsed(records, "models/model.json", path))
    except ValueError as error:
        raise refuse(str(error)) from error
    return records


def _inner(name: str) -> str:
    """The name of a member below the archive's one folder."""
    return name.partition("/")[2]


def _parsed(records: Mapping[str, bytes], name: str, path: Path) -> dict[str, Any]:
    try:
        held = json.loads(records[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise RunError(f"{path} has no readable {name}; export the run again") from error
    if not isinstance(held, dict):
        raise RunError(f"{path} has no readable {name}; export the run again")
    return held


def _check(value: Any, key: str = "", depth: int = 0) -> None:
    """Raise a ValueError, naming the place, for a text of the program that is not of the kind it should be."""
    if depth > _DEEPEST:
        raise ValueError("it is nested deeper than any network")
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} in it is no name")
            if name in ("metadata", "guards_code", "custom_obj_values", "extra_files") and inner:
                raise ValueError(f"it has {name}, which no network needs")
            _check(inner, name, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, key, depth + 1)
    elif isinstance(value, str):
        kinds = {"target": _is_operator, "expr_str": _is_expression, "in_spec": _is_spec, "out_spec": _is_spec}
        kinds["torch_version"] = lambda text: bool(_VERSION.fullmatch(text))
        if not kinds.get(key, lambda text: bool(_NAME.fullmatch(text)))(value):
            raise ValueError(f"its {key or 'text'} is {value[:60]!r}")


def _is_operator(text: str) -> bool:
    """An operator of ATen that computes: none that reads or writes files."""
    found = _OPERATOR.fullmatch(text)
    if not found:
        return text in _PLAIN_CALLS
    packet = getattr(torch.ops.aten, found[1], None)
    overload = getattr(packet, text.rpartition(".")[2], None)
    schema = getattr(overload, "_schema", None)
    return schema is not None and not any("file" in argument.name for argument in schema.arguments)


def _is_expression(text: str) -> bool:
    """Arithmetic of sizes, as sympy prints it."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in _IN_EXPRESSIONS):
                return False
        elif isinstance(node, ast.Name):
            if not re.fullmatch(r"[A-Za-z]\w{0,40}", node.id):
                return False
        elif isinstance(node, ast.Constant):
            if not isinstance(node.value, int | str) or not re.fullmatch(r"-?\w{1,40}", str(node.value)):
                return False
        elif not isinstance(node, ast.Expression | ast.keyword | ast.Load | ast.UnaryOp | ast.USub):
            return False
    return True


def _is_spec(text: str) -> bool:
    """How arguments are nested: in tuples, lists and dicts."""
    try:
        held = json.loads(text)
        return isinstance(held, list) and len(held) == 2 and isinstance(held[0], int) and _is_nest(held[1])
    except (ValueError, RecursionError):
        return False


def _is_nest(tree: Any) -> bool:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"}:
        return False
    if tree["type"] not in _CONTAINERS or not isinstance(tree["children_spec"], list):
        return False
    context = tree["context"]
    if not (
        context is None or (isinstance(context, str) and re.fullmatch(r'null|\[("\w*"(, "\w*")*)?\]', context))
    ):
        return False
    return all(_is_nest(child) for child in tree["children_spec"])
