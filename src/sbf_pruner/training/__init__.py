"""Train, prune and fine-tune a network as a recipe describes.

`fit` executes a `Recipe` and writes the results to a run folder.
"""

from ..utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "device": (
            "Machine",
            "choose_machine",
            "choose_order",
            "own_arithmetic",
        ),
        "epoch": (
            "CALIBRATED_ON",
            "Epochs",
        ),
        "latency_target": (
            "CLOSE",
            "LANDINGS",
            "Timed",
            "coupling",
            "timer_here",
        ),
        "networks": (
            "attach",
            "load_weights",
        ),
        "recipe": (
            "Recipe",
            "bundled_recipes",
            "load_recipe",
            "settings",
        ),
        "recording": (
            "MEASURED_ON",
            "under_scores",
            "when_pruned",
        ),
        "run": (
            "Result",
            "Run",
            "Signals",
            "check_shared",
            "fit",
        ),
        "run_folder": (
            "DECIDES",
            "NAME",
            "RunFolder",
            "SCORED",
            "build_dense",
            "load_checkpoint",
            "save_checkpoint",
        ),
        "schedule": (
            "batch_size",
            "cycles_end",
            "is_taught",
            "learning_rate",
            "optimizer_config",
            "phases",
            "total_epochs",
        ),
        "sections": (
            "DataConfig",
            "GuardsConfig",
            "ModelConfig",
            "OptimizerConfig",
            "PhasesConfig",
            "ScoresConfig",
        ),
    },
)
