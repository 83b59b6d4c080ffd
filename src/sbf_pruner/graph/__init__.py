"""Trace a model into a channel graph: what its operators do to channels, and which layers can be pruned."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "build": ("trace",),
        "channel_graph": (
            "ChannelGraph",
            "LayoutConstraints",
            "residual_blocks",
        ),
        "cost": (
            "FilterCosts",
            "cost_of",
            "lay_out",
            "network_cost",
        ),
        "layer_nodes": (
            "LayerNode",
            "Norm",
        ),
        "layout": ("solve_layout",),
        "nodes": (
            "Boundary",
            "Elementwise",
            "Flow",
            "ChannelMove",
            "Opaque",
            "Source",
            "equalize_groups",
            "shrink",
        ),
        "recorder": ("meta_result",),
        "records": ("STALE",),
        "tracer": ("record",),
        "train_eval": ("may_read_training",),
    },
)
