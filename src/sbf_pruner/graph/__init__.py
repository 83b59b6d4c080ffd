"""Trace a model into a channel graph: what its operators do to channels, and which layers can be pruned."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "build": ("trace",),
        "channel_graph": ("ChannelGraph", "FixedSizes", "residual_blocks", "solve_layout"),
        "cost": ("FilterCosts", "cost_of", "lay_out", "network_cost"),
        "nodes": (
            *("Boundary", "ChannelMove", "Elementwise", "Flow", "Opaque", "Source"),
            *("equalize_groups", "shrink"),
        ),
        "operators.layers": ("LayerNode", "Norm"),
        "recorder": ("meta_result",),
        "records": ("STALE",),
        "tracer": ("record",),
        "train_eval": ("may_read_training",),
    },
)
