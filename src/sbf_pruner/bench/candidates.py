"""The forms worth trying on each runtime, of the dense network and of the compact one.

The name of a runtime enters; forms by name leave.  The dense network gets the same care: every form that can
make a difference to it.  Where making a network ready takes long (a compiler), one form is all there is.
"""

from __future__ import annotations

from dataclasses import replace

from ..deploy.forms import Form

_EAGER = Form(in_place=True)
_ONNX = Form(shortcuts=True)
CANDIDATES: dict[str, dict[str, Form]] = {
    "eager": {
        "zero filters, channels last": replace(_EAGER, channels_last=True),
        "zero filters": _EAGER,
        "added at places, channels last": replace(_EAGER, branches="add", channels_last=True),
        "added at places": replace(_EAGER, branches="add"),
        "widths of 4, channels last": replace(_EAGER, unit=4, channels_last=True),
    },
    "compile": {"zero filters, channels last": Form(channels_last=True)},
    "onnxruntime": {
        "widths of 4": replace(_ONNX, unit=4),
        "zero filters": _ONNX,
        "gathered": replace(_ONNX, branches="gather"),
    },
    "openvino": {"zero filters": _ONNX, "widths of 8": replace(_ONNX, unit=8)},
}


def candidates(runtime: str, *, dense: bool) -> dict[str, Form]:
    """The forms to try on a runtime, by name.

    >>> sorted(candidates("eager", dense=True)), len(candidates("eager", dense=False))
    (['as it is', 'channels last'], 5)
    """
    forms = CANDIDATES[runtime]
    if not dense:
        return forms
    # Nothing is moved in a dense network and its widths are its own; where its channels lie does matter.
    kinds = {form.channels_last: replace(form, branches="zeros", unit=1) for form in forms.values()}
    return {"channels last" if last else "as it is": form for last, form in kinds.items()}
