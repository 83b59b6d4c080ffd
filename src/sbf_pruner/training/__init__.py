"""Train, prune and fine-tune a network as a recipe describes.

`fit` executes a `Recipe` and writes the results to a run folder.
"""

from ..utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "device": ("ComputeConfig", "choose_machine", "choose_memory_format", "restore_torch_settings"),
        "epoch": ("RECALIBRATION_BATCHES", "EpochRunner"),
        "latency_target": ("TOLERANCE", "MAX_LANDINGS", "LatencyTarget", "with_way", "make_plan_timer"),
        "networks": ("build_pruner", "load_weights"),
        "recipe": (
            *("DataConfig", "ModelConfig", "OptimizerConfig", "PhasesConfig", "Recipe", "ScoresConfig"),
            *("bundled_recipes", "load_recipe", "settings"),
        ),
        "recording": ("MEASURED_ON", "scored_refinement", "pruned_refinement"),
        "run": ("Result", "Run", "Signals", "check_divisible", "fit"),
        "run_folder": (
            *("DENSE_STAGE_KEYS", "LAST_CHECKPOINT", "RunFolder", "SCORED", "build_dense"),
            *("load_checkpoint", "save_checkpoint"),
        ),
        "schedule": (
            *("batch_size", "cycles_end", "is_distilled", "learning_rate", "optimizer_config", "phases"),
            "total_epochs",
        ),
    },
)
