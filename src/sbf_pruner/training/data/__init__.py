"""Data sets, their splits, and batches of images."""

from ...utils.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "batches": ("Augment", "DeviceBatches", "Split", "LazySplit"),
        "cifar10": (
            "Archive",
            "FILE",
            "PARTS",
            "Part",
            "default_folder",
            "download",
            "load_cifar10",
            "prepare_cifar10",
            "read_archive",
            "read_pickle",
        ),
        "datasets": ("Data", "RunBatches", "SOURCES", "batches_of", "load_data", "own_data", "register"),
        "images": ("LoaderBatches", "View", "read_picture"),
    },
)
