"""Compare pruning methods, sizes of one network, and the dense with the pruned network."""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "bench": (
            "BenchOptions",
            "Subject",
            "page_faults",
            "resolve_subject",
            "read_settings",
            "run_bench",
        ),
        "bench_advice": (
            "LAYERS",
            "MOVES",
            "Part",
            "REST",
            "advise",
            "dissect",
            "fixed_share",
            "verdict",
        ),
        "frontier": (
            "FrontierOptions",
            "draw_frontier",
            "read_scored",
            "run_frontier",
        ),
        "method_runs": (
            "check_methods",
            "plan_runs",
            "rank_methods",
        ),
    },
)
