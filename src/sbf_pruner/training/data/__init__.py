"""Data sets, their splits, and batches of images."""

from ...utils import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "batches": (
            *("Augment", "Data", "DeviceBatches", "LazySplit", "LoaderBatches", "RunBatches", "Split"),
            "batches_of",
        ),
        "cifar10": (
            *("Archive", "FILE", "PARTS", "Part", "default_folder", "download", "load_cifar10", "prepare_cifar10"),
            *("read_archive", "read_pickle"),
        ),
        "datasets": ("SOURCES", "View", "load_data", "own_data", "read_picture", "register"),
    },
)
