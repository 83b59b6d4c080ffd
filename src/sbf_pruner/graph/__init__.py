"""Trace a model into a channel graph: what its operators do to channels, and which layers can be pruned."""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "build": ("trace",),
        "channel_graph": (
            "ChannelGraph",
            "Ties",
            "residual_blocks",
        ),
        "cost": (
            "Appraiser",
            "cost_of",
            "lay_out",
            "network_cost",
        ),
        "layer_nodes": (
            "Contract",
            "Norm",
        ),
        "layout": ("solve",),
        "nodes": (
            "Boundary",
            "Elementwise",
            "Flow",
            "Map",
            "Opaque",
            "Source",
            "level",
            "shrink",
        ),
        "recorder": ("quick_result",),
        "records": ("STALE",),
        "tracer": ("record",),
        "train_eval": ("asks_for_its_mode",),
    },
)
