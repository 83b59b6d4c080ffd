"""Rewrites of a trained network for inference in a runtime: eager PyTorch, torch.compile or ONNX Runtime."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "capture": ("export_program",),
        "forms": ("BRANCHES", "CapturedNetwork", "Form", "groups", "make_forms"),
        "onnx": ("run", "session", "to_onnx"),
        "table": (
            *("LATENCY_RUNTIMES", "Placement", "RUNTIMES", "Unavailable", "choose", "make_runner", "min_times"),
            "outputs",
        ),
    },
)
