"""Rewrites of a trained network for inference in a runtime: eager PyTorch, torch.compile or ONNX Runtime."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "capture": (
            "exported",
            "first_line",
        ),
        "forms": (
            "BRANCHES",
            "Deployable",
            "FORMS",
            "Form",
            "choose",
            "fastest",
            "ready",
            "written",
        ),
        "onnx": (
            "run",
            "session",
            "to_onnx",
        ),
        "widths": ("groups",),
    },
)
