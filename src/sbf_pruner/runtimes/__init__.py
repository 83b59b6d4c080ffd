"""Rewrites of a trained network for inference in a runtime: eager PyTorch, torch.compile or ONNX Runtime."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "capture": (
            "export_program",
            "first_line",
        ),
        "forms": (
            "BRANCHES",
            "CapturedNetwork",
            "FORMS",
            "Form",
            "choose",
            "min_times",
            "make_runner",
            "make_forms",
        ),
        "onnx": (
            "run",
            "session",
            "to_onnx",
        ),
        "widths": ("groups",),
    },
)
