"""Export networks to ONNX and run them in ONNX Runtime on the CPU.

Files have a dynamic batch dimension and are checked before they are written. Dense and pruned networks are exported
the same way, in evaluation mode and with the exporter's own optimization (norms folded into convolutions), so that
their times can be compared. Exporter metadata is removed. The model is not changed.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..utils.files import atomic_path
from ..utils.user_code import one_line_error
from .capture import eval_copy, export_arguments, suppress_exporter_output


def to_onnx(model: nn.Module, example_inputs: Any, path: str | Path) -> Path:
    """Write a network as an ONNX file with a dynamic batch dimension, atomically, and return its path.

    `example_inputs` are as for `trace`: a tensor, a tuple of positional or a dict of keyword arguments. Raise a
    PruningError if the network cannot be exported or runs with one batch size only.
    """
    import_onnxruntime()
    path = Path(path)
    network = eval_copy(model)
    args, kwargs, shapes = export_arguments(example_inputs)
    # torch.onnx.export reads a dict at the end of args as keyword arguments, so an empty one is appended to args.
    args = args if kwargs else (*args, {})
    try:
        with suppress_exporter_output(), torch.no_grad():
            program = torch.onnx.export(network, args, kwargs=kwargs or None, dynamic_shapes=shapes, verbose=False)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Outer errors only name the failed step.
            cause = cause.__cause__
        raise _export_error(model, one_line_error(cause)) from error
    assert program is not None
    proto = program.model_proto
    _strip_metadata(proto)
    inputs = [given.type.tensor_type.shape.dim for given in proto.graph.input]
    if any(sizes and not sizes[0].dim_param for sizes in inputs):  # The exporter may fix it without a warning.
        raise _export_error(model, "its forward fixes the batch size")
    importlib.import_module("onnx").checker.check_model(proto, full_check=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
    return path


def session(path: str | Path, threads: int = 0) -> Any:
    """Open an ONNX Runtime session on the CPU; if `threads` is 0, ONNX Runtime uses one thread per core."""
    runtime = import_onnxruntime()
    try:
        return runtime.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:
        why = one_line_error(error)
        raise PruningError(f"{path} cannot be run by ONNX Runtime ({why}); export it again") from error


def session_options(threads: int) -> Any:
    """Return the options of all ONNX Runtime sessions in this package, for networks and single layers."""
    options = import_onnxruntime().SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Spinning idle threads would take cores from whatever runs next, such as another session.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def session_inputs(session: Any, inputs: Any) -> dict[str, Any]:
    """Return the tensors of `inputs` as NumPy arrays by name, matched to the session's inputs in order."""
    names = [argument.name for argument in session.get_inputs()]
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if len(names) != len(tensors):
        raise PruningError(f"the ONNX network takes {len(names)} inputs, not {len(tensors)}: {', '.join(names)}")
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in zip(names, tensors, strict=True)}


def run(session: Any, inputs: Any) -> list[Tensor]:
    """Run a session on the given inputs and return its outputs."""
    return [torch.from_numpy(array) for array in session.run(None, session_inputs(session, inputs))]


def import_onnxruntime() -> ModuleType:
    """Import ONNX Runtime; raise a PruningError if a package needed for exporting is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise PruningError(f'exporting to ONNX needs {name}; run: pip install "sbf-pruner[export]"')
    return importlib.import_module("onnxruntime")


def _export_error(model: nn.Module, why: str) -> PruningError:
    return PruningError(
        f"{type(model).__name__} cannot be written as ONNX ({why}); the model must accept any batch size, and "
        "every operator must be one that torch.onnx supports"
    )


def _strip_metadata(proto: Any) -> None:
    """Remove the exporter's metadata, which contains local paths and can be as large as a small network."""
    graph = proto.graph
    parts = [proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for function in proto.functions:
        parts += [function, *function.node, *function.value_info]
    for part in parts:
        del part.metadata_props[:]
    for part in (graph, *graph.node):
        part.doc_string = ""
