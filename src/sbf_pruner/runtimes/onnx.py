"""A network as an ONNX file, and ONNX Runtime to run it.

A network and example inputs enter; one checked ONNX file leaves, whose batch may have any size, and a session
that runs it on a given number of threads.  Dense and compact networks go the same way, with the same care:
evaluation mode, the exporter's own optimisation (norms folded into convolutions), nothing in the file but what
is needed to compute.  What holds: the network comes out as it went in.
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
from ..utils.files import replacing
from .capture import arguments, batch_of_two, dynamic_batch, evaluated_copy, first_line, quietly

EXTRA = 'pip install "sbf-pruner[export]"'
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def to_onnx(model: nn.Module, example_inputs: Any, path: str | Path) -> Path:
    """Write a network as an ONNX file with a batch of any size, checked, in one step.

    `example_inputs` is what `trace` takes: a tensor, a tuple of positional arguments or a dict of keyword ones.
    """
    require()
    path = Path(path)
    network = evaluated_copy(model)
    args, kwargs = arguments(batch_of_two(example_inputs))
    shapes = dynamic_batch(kwargs or args)
    try:
        with quietly(), torch.no_grad():
            # A dict that comes last is taken for the keyword arguments, unless an empty one stands behind it.
            given = args if kwargs else (*args, {})
            program = torch.onnx.export(
                network, given, kwargs=kwargs or None, dynamic_shapes=shapes, dynamo=True, verbose=False
            )
    except Exception as error:
        raise _unwritten(model, first_line(_innermost(error))) from error
    assert program is not None
    proto = _stripped(program.model_proto)
    if any(_fixed_batch(held) for held in proto.graph.input):  # which torch does without a word
        raise _unwritten(model, "a size in its forward fixes the batch")
    importlib.import_module("onnx").checker.check_model(proto, full_check=True)
    with replacing(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
    return path


def session(path: str | Path, threads: int = 0) -> Any:
    """An ONNX Runtime session on the CPU with all its optimisations; 0 threads: as many as there are cores."""
    runtime = require()
    try:
        return runtime.InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise PruningError(
            f"{path} cannot be run by ONNX Runtime ({first_line(error)}); export it again"
        ) from error


def session_options(threads: int) -> Any:
    """How networks and layers are run alike."""
    options = require().SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Idle threads that spin would take the cores from whatever runs next, another session say.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def feed(session: Any, inputs: Any) -> dict[str, Any]:
    """What a session is fed: the tensors of the inputs in the order of the network's arguments, as arrays."""
    names = [argument.name for argument in session.get_inputs()]
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if len(names) != len(tensors):
        raise PruningError(f"the ONNX network takes {len(names)} inputs, not {len(tensors)}: {', '.join(names)}")
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in zip(names, tensors, strict=True)}


def run(session: Any, inputs: Any) -> list[Tensor]:
    """The outputs of a session on the given inputs."""
    return [torch.from_numpy(array) for array in session.run(None, feed(session, inputs))]


def require() -> ModuleType:
    """ONNX Runtime, if all that exporting needs is there."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise PruningError(f"exporting to ONNX needs {name}; run: {EXTRA}")
    return importlib.import_module("onnxruntime")


def _innermost(error: BaseException) -> BaseException:
    """What the exporter wrapped: its own errors tell in which step it was, and how to report that to its makers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _unwritten(model: nn.Module, why: str) -> PruningError:
    return PruningError(
        f"{type(model).__name__} cannot be written as ONNX ({why}); its batch must be free to have any size, and "
        "every operator must be one that torch.onnx knows"
    )


def _fixed_batch(held: Any) -> bool:
    sizes = held.type.tensor_type.shape.dim
    return bool(sizes) and not sizes[0].dim_param


def _stripped(proto: Any) -> Any:
    """Without the exporter's notes, which name folders of this machine and are as long as a small network."""
    for held in (proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.functions):
        del held.metadata_props[:]
    for held in (*proto.graph.value_info, *proto.graph.initializer):
        del held.metadata_props[:]
    for function in proto.functions:
        for held in (*function.node, *function.value_info):
            del held.metadata_props[:]
    for held in (proto.graph, *proto.graph.node):
        held.doc_string = ""
    return proto
