"""An ONNX network in eight-bit integers, by ONNX Runtime's static quantisation.

An ONNX file and batches of training images enter; a file leaves whose convolutions and matrix products run in
integers, with ranges that were seen on those images.  What it costs in accuracy has to be measured on other
images; `accuracy` does that in ONNX Runtime.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import DataError
from ..files import replacing
from .captured import quietly
from .onnx import require, run, session

IMAGES = 512  # that the ranges are taken from


def quantise(source: Path, batches: Iterable[tuple[Tensor, Tensor]], path: Path) -> int:
    """Write the network in eight-bit integers; the number of images the ranges were taken from."""
    require()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = session(source, 1).get_inputs()[0].name
    reader = _Reader(name, batches)
    with tempfile.TemporaryDirectory() as folder, quietly(), _silent(), replacing(path) as temporary:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(source), str(prepared))
        quantization.quantize_static(
            str(prepared),
            str(temporary),
            reader,
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
        )
    return reader.seen


def accuracy(path: Path, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The percentage of images whose largest output is the label's, in ONNX Runtime."""
    ready, hits, seen = session(path), 0, 0
    for images, labels in batches:
        (outputs,) = run(ready, images)
        hits += int((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    if not seen:
        raise DataError("there is no test image to measure the accuracy on")
    return 100 * hits / seen


class _Reader:
    """Hands out images until enough have been seen, as ONNX Runtime asks for them."""

    def __init__(self, name: str, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.name, self.batches = name, iter(batches)
        self.seen = 0

    def get_next(self) -> dict[str, Any] | None:
        images = next(self.batches, (None, None))[0] if self.seen < IMAGES else None
        if images is None:
            return None
        images = images[: IMAGES - self.seen]
        self.seen += len(images)
        return {self.name: images.numpy()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.get_next, None)


@contextmanager
def _silent() -> Iterator[None]:
    """The quantiser writes advice to the root logger."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
