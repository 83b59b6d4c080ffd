"""Images that are read as they are needed give the runs that images in memory give; a user's datasets are taken."""

from __future__ import annotations

import os
import random
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from runs import Small, small_recipe
from sbf_pruner.errors import DataError, RecipeError, RunError
from sbf_pruner.training import DataConfig, fit
from sbf_pruner.training.data import (
    Augment,
    Data,
    DeviceBatches,
    LazySplit,
    LoaderBatches,
    RunBatches,
    Split,
    View,
    batches_of,
    datasets,
    load_data,
    own_data,
    read_picture,
)
from sbf_pruner.training.engine import CapturedEngine, Engine
from sbf_pruner.utils import TRUSTED, DistributedContext

CLASSES = 4


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey pictures of many sizes, brighter from class to class."""
    root, random = tmp_path_factory.mktemp("flowers"), np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 5)):
        for label in range(CLASSES):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = random.integers(9, 20, 2)
                pixels = random.integers(0, 120, (height, width)) + 40 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig("folder", str(path), image_size=8, channels=1, **changes)


def data_of(path: Path, **changes: Any) -> Data:
    return load_data(config(path, **changes), CLASSES, seed=0)


def joined(batches: DeviceBatches | LoaderBatches, index: int) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches.epoch(index), strict=True)
    return torch.cat(images), torch.cat(labels)


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- batches

EVERYTHING = Augment(crop=2, flip=True, cutout=3, mixup=0.4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment", [None, Augment(), EVERYTHING], ids=["judged", "plain", "everything"])
def test_batches_from_files_are_those_from_memory(flowers: Path, augment: Augment | None, workers: int) -> None:
    there, read = data_of(flowers, validation=0.2), data_of(flowers, validation=0.2, in_memory=False)
    assert isinstance(there.train, Split) and isinstance(read.train, LazySplit)
    assert (there.mean, there.std) == (read.mean, read.std)
    for part in ("train", "validation", "test"):
        how: dict[str, Any] = {"augment": augment, "seed": 3, "num_classes": CLASSES}
        one = batches_of(getattr(there, part), 7, there, **how)
        other = batches_of(getattr(read, part), 7, read, workers=workers, **how)
        assert isinstance(one, DeviceBatches) and isinstance(other, LoaderBatches)
        assert len(one) == len(other)
        for index in (0, 5):
            assert_same(joined(one, index), joined(other, index))


def test_a_window_shows_a_part_of_a_picture_that_does_not_depend_on_who_reads(flowers: Path) -> None:
    data = data_of(flowers, in_memory=False, scale=0.25)
    assert isinstance(data.train, LazySplit)
    how: dict[str, Any] = {"augment": Augment(scale=0.25), "seed": 1, "num_classes": CLASSES}
    one, other = (batches_of(data.train, 8, data, workers=workers, **how) for workers in (0, 2))
    assert isinstance(one, LoaderBatches) and isinstance(other, LoaderBatches)
    assert_same(joined(one, 2), joined(other, 2))
    whole = batches_of(data.train, 8, data, workers=0, augment=Augment(), seed=1, num_classes=CLASSES)
    assert isinstance(whole, LoaderBatches)
    assert not torch.equal(joined(whole, 2)[0], joined(one, 2)[0])
    assert torch.equal(joined(whole, 2)[1], joined(one, 2)[1])  # the same pictures, in the same order
    assert one.draw(2)["window"][:, 0].min() >= 0.25


def test_windows_have_the_area_they_should_and_stay_inside() -> None:
    view, random = View(8), np.random.default_rng(0)
    for area, shape, x, y in random.uniform(0.1, 1, (200, 4)):
        left, top, right, bottom = view.window(60, 60, (area, shape, x, y))
        assert 0 <= left < right <= 60 and 0 <= top < bottom <= 60
        if max(right - left, bottom - top) < 60:  # nothing was cut off
            assert (right - left) * (bottom - top) == pytest.approx(area * 3600)
            assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9


def test_pictures_are_stretched_or_cropped(tmp_path: Path) -> None:
    pixels = np.zeros((4, 12), dtype=np.uint8)
    pixels[:, 4:8] = 200  # the square in the middle
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    stretched, cropped, middle = (
        read_picture(tmp_path / "wide.png", view)
        for view in (View(4, 1), View(4, 1, "crop"), View(4, 1, "stretch", 1 / 3))
    )
    assert stretched.min() < 60 and (cropped == 200).all() and (middle == 200).all()


def test_a_process_of_a_team_reads_its_own_part_alone(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(flowers, in_memory=False)
    read: list[Any] = []
    original = type(data.train.dataset).__getitem__  # type: ignore[union-attr]

    def noted(self: Any, key: Any) -> Any:
        read.append(key)
        return original(self, key)

    monkeypatch.setattr(type(data.train.dataset), "__getitem__", noted)  # type: ignore[union-attr]
    for augment, rows in ((Augment(flip=True), 20), (EVERYTHING, 40), (None, 20)):
        batches = batches_of(data.train, 8, data, workers=0, augment=augment, num_classes=CLASSES)
        whole = list(batches.epoch(1))
        for rank in range(2):
            read.clear()
            mine = list(batches.parts(1, DistributedContext(rank, 2)))
            assert len(read) == rows  # blends reach across the whole batch
            for (images, labels), part in zip(whole, mine, strict=True):
                assert_same((images[rank::2], labels[rank::2]), part)


# --- engines


def one_epoch(engine: Engine, batches: Any, kind: str) -> tuple[float, ...]:
    if kind == "evaluate":
        tally = engine.evaluate(batches)
    else:
        optimizer = torch.optim.SGD(engine.network.parameters(), torch.tensor(0.1))
        tally = engine.train_epoch(batches, 4, optimizer, [0.1] * len(batches))
    return tally.loss, tally.accuracy, *(p.sum().item() for p in engine.network.parameters())


@pytest.mark.parametrize("augment", [Augment(flip=True), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_captured_steps_are_handed_what_is_read(flowers: Path, augment: Augment, kind: str) -> None:
    found = []
    for in_memory in (True, False):
        data = data_of(flowers, in_memory=in_memory)
        how: dict[str, Any] = {"augment": augment if kind == "train" else None, "num_classes": CLASSES}
        for engine in (Engine, CapturedEngine):
            torch.manual_seed(0)
            batches = batches_of(data.train, 8, data, workers=0, **how)
            found.append(one_epoch(engine(Small(), "cpu"), batches, kind))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
    if kind == "train":  # the captured evaluation adds up in another order
        assert found[1] == found[3]


# --- runs


def killed_after(epochs: int) -> Any:
    """Interrupts the run when so many epochs are done."""

    def report(record: dict[str, Any]) -> None:
        if record["done"] == epochs:
            raise KeyboardInterrupt

    return report


def recipe_for(path: Path, **changes: Any) -> Any:
    table = {"name": "folder", "path": str(path), "image_size": 8, "channels": 1, "batch_size": 16, "workers": 0}
    return small_recipe(data={**table, **changes}, dense_control=False)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_from_files_is_that_from_memory_also_when_it_was_killed(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    net = Small()
    there = fit(net, recipe_for(flowers, flip=True), run=tmp_path / "memory")
    read = recipe_for(flowers, flip=True, in_memory=False)
    again = fit(net, read, run=tmp_path / "files")
    assert_same_run(tmp_path / "memory", tmp_path / "files")
    assert there.summary["pruned"]["accuracy"] == again.summary["pruned"]["accuracy"]
    with pytest.raises(KeyboardInterrupt):
        fit(net, read, run=tmp_path / "killed", report=killed_after(3))
    fit(net, read, run=tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "files", tmp_path / "killed")


class Shades(Dataset[tuple[Tensor, int]]):
    """Floats that are ready for a network: brighter from class to class, under noise that torch draws."""

    def __init__(self, count: int, noise: float = 0.1) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        label = row % CLASSES
        return label + self.noise * torch.randn(1, 8, 8), label


OWN_MODULE = """
import torch
from torch.utils.data import TensorDataset

def datasets(path, seed):
    assert path == "somewhere" and seed == 0
    labels = torch.arange(32) % 4
    images = labels.view(-1, 1, 1, 1).expand(-1, 1, 8, 8) / 4
    pairs = TensorDataset(images.contiguous(), labels)
    return {"train": pairs, "val": pairs, "test": pairs}

def broken():
    return {}["nothing"]

def choosy(path, fold, **more):
    return {}

number = 3
"""


def test_a_run_learns_from_datasets_of_the_users(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net, some = Small(), small_recipe(data={"name": "shades", "batch_size": 16, "workers": 0}, dense_control=False)
    sets = {"train": Shades(64), "test": Shades(32, 0.0)}
    first = fit(net, some, data=sets, run=tmp_path / "first")
    assert first.summary["pruned"]["accuracy"] > 60 and first.summary["data"]["mean"] == []
    with pytest.raises(KeyboardInterrupt):
        fit(net, some, data=sets, run=tmp_path / "second", report=killed_after(4))
    with pytest.raises(RunError, match=r"began with 64 images for train, and now there are 48; give the same"):
        fit(net, some, data=sets | {"train": Shades(48)}, run=tmp_path / "second", resume=True)
    fit(net, some, data=sets, run=tmp_path / "second", resume=True)  # noise and all
    assert_same_run(tmp_path / "first", tmp_path / "second")


def test_a_recipe_names_a_function_that_makes_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "makes_data.py").write_text(OWN_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "makes_data", raising=False)
    data = load_data(DataConfig("makes_data:datasets", "somewhere"), CLASSES, 0, TRUSTED)
    assert len(data.train) == len(data.validation) == len(data.test) == 32 and data.mean == ()
    batches = batches_of(data.test, 8, data, workers=0)
    assert torch.equal(joined(batches, 0)[0][:, 0, 0, 0], torch.arange(32) % 4 / 4)  # type: ignore[arg-type]
    for name, said in {
        "makes_data:nothing": r"data.name: makes_data:nothing: makes_data has no 'nothing'",
        "no_such_module:datasets": r"data.name: .*no module named 'no_such_module' in this folder or among",
        "makes_data:number": r"data.name: makes_data:number cannot be called; name a function that",
        "makes_data:broken": r"data.name: makes_data:broken failed at makes_data.py:\d+ .*KeyError",
        "makes_data:choosy": r"choosy requires 'fold', but is passed path, image_size, num_classes, seed; give",
        "makes_data:": r"not a complete name; write package.module:callable",
    }.items():
        with pytest.raises(DataError, match=said):
            load_data(DataConfig(name), CLASSES, 0, TRUSTED)
    with pytest.raises(DataError, match=r"^data.image_size: makes_data:datasets does not use it"):
        load_data(DataConfig("makes_data:datasets", "somewhere", image_size=8), CLASSES, 0, TRUSTED)


# --- messages


class Torn(Shades):
    """One item fails."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 9:
            raise OSError("the disk\nis gone")
        return super().__getitem__(row)


class Ragged(Shades):
    """One item is larger."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(row)
        return (image.repeat(1, 2, 1) if row == 9 else image), label


class Unending(IterableDataset[Any]):
    """It has no length."""

    def __iter__(self) -> Any:
        return iter(())


def pair(image: Any, label: Any = 0) -> Any:
    class One(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, row: int) -> Any:
            return image, label

    return One()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Torn, r"^data, train, item 9 cannot be read \(OSError: the disk\); repair or remove it$"),
        (Ragged, r"^data, train, item 9 is \(1, 16, 8\), and the first \(1, 8, 8\) \(channels, height, width\)"),
    ],
)
def test_an_item_that_cannot_be_read_is_one_sentence(kind: type[Shades], said: str, workers: int) -> None:
    data = own_data({"train": kind(16), "test": Shades(4)}, DataConfig("own"), CLASSES, 0)
    with pytest.raises(DataError, match=said):
        list(batches_of(data.train, 4, data, workers=workers).epoch(0))


def test_a_label_that_is_no_class_is_told(flowers: Path) -> None:
    data = own_data({"train": Shades(16), "test": Shades(4)}, DataConfig("own"), 2, 0)
    with pytest.raises(
        DataError,
        match=r"^data, train, item 2: label 2 is outside 0..1; count classes from 0",
    ):
        list(batches_of(data.train, 4, data, workers=0, num_classes=2).epoch(0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Shades(4)], r"expected \{'train': dataset, 'test': dataset\}, perhaps with 'val', got list"),
        ({"train": Shades(4)}, r"expected .*, got keys train"),
        (
            {"train": Unending(), "test": Shades(4)},
            r"data, train: a Unending is not a map-style dataset; give one with __len__",
        ),
        ({"train": Shades(0), "test": Shades(4)}, r"data, train: holds no images"),
        ({"train": TensorDataset(torch.zeros(4, 1, 8, 8)), "test": Shades(4)}, r"an item is a tuple; give pairs"),
        ({"train": pair(np.zeros((8, 8))), "test": Shades(4)}, r"an image is a ndarray, not a tensor"),
        ({"train": pair(torch.zeros(8, 8)), "test": Shades(4)}, r"torch.float32 of shape \(8, 8\); give C,H,W"),
        (
            {"train": pair(torch.zeros(1, 8, 8), 0.5), "test": Shades(4)},
            r"a label is 0.5; give the number of a class",
        ),
    ],
)
def test_datasets_that_will_not_do(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        own_data(given, DataConfig("own"), CLASSES, 0)


class Fades(Shades):
    """Pixels under noise of every kind."""

    def __getitem__(self, row: int) -> tuple[Tensor, Any]:
        noise = torch.rand(1, 8, 8) + random.random() + float(np.random.rand())
        return (40 * (row % CLASSES) + 40 * noise).to(torch.uint8), np.int64(row % CLASSES)


def test_what_pixels_are_normalised_by_does_not_depend_on_chance() -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), torch.get_rng_state()
        data = own_data({"train": Fades(32), "test": Fades(8)}, DataConfig("own"), CLASSES, 0)
        made.append((data.mean, data.std))
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert made[0] == made[1] and made[0][0]
    batches = batches_of(data.test, 4, data, workers=0)
    assert joined(batches, 0)[1].tolist() == [0, 1, 2, 3] * 2  # type: ignore[arg-type]


class Mixed(Shades):
    """From the tenth item on the image or the label is another."""

    def __init__(self, count: int, image: Any = None, label: Any = None) -> None:
        super().__init__(count)
        self.image, self.label = image, label

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(row)
        if row < 9:
            return image, label
        return image if self.image is None else self.image, label if self.label is None else self.label


class Failing(Shades):
    """Not even the first item can be read."""

    def __getitem__(self, row: int) -> Any:
        return {}["image"]


def test_items_of_another_kind_than_the_first_are_told() -> None:
    for later, said in (
        (Mixed(16, label=0.7), r"^data, train, item 9: a label is 0.7; give the number of a class"),
        (
            Mixed(16, torch.zeros(1, 8, 8, dtype=torch.uint8)),
            r"^data, train, item 9 is torch.uint8, the first",
        ),
        (Mixed(16, np.zeros((1, 8, 8))), r"^data, train, item 9: an image is a ndarray, not a tensor"),
    ):
        data = own_data({"train": later, "test": Shades(4)}, DataConfig("own"), CLASSES, 0)
        with pytest.raises(DataError, match=said):
            list(batches_of(data.train, 4, data, workers=0).epoch(0))
    wrong: dict[str, Any] = {
        r"data, train: its first item cannot be read: test_images.py:\d+ .*KeyError": Failing(4),
        r"data, train: a DataLoader is not a map-style dataset": DataLoader(Shades(4)),
        r"own, test: train and test have different dtypes; make both uint8, or both float": Fades(4),
    }
    for said, train in wrong.items():
        with pytest.raises(DataError, match=said):
            own_data({"train": train, "test": Shades(4)}, DataConfig("own"), CLASSES, 0)


def test_settings_that_do_not_go_with_the_data(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"train": Shades(8), "test": Shades(8)}
    with pytest.raises(DataError, match=r"data.validation: .*your own dataset.*; pass one called 'val'"):
        own_data(sets, DataConfig("own", validation=0.5), CLASSES, 0)
    with pytest.raises(DataError, match=r"data.mean: floating-point images .*; leave out mean and std"):
        own_data(sets, DataConfig("own", mean=[0.5], std=[0.5]), CLASSES, 0)
    with pytest.raises(
        DataError, match=r"data.scale: random windows are only read from image files; set data.name=folder"
    ):
        data_of(flowers, scale=0.5)
    with pytest.raises(DataError, match=r"data.mean: 3 numbers for 1 channels; give one for each"):
        data_of(flowers, mean=[0.5] * 3, std=[0.5] * 3)
    with pytest.raises(RecipeError, match=r"mean: 1 means and 0 deviations; give as many of both"):
        DataConfig("digits", mean=[0.5])
    with pytest.raises(RecipeError, match=r"std: deviations must be above 0, because images are divided by them"):
        DataConfig("digits", mean=[0.5], std=[0.0])
    monkeypatch.setattr(datasets, "available_memory", lambda device: 1)
    with pytest.raises(DataError, match=r"data.in_memory: 60 images of 8x8 take .* set data.in_memory=false"):
        data_of(flowers)


def test_pixels_are_normalised_by_what_the_recipe_says(flowers: Path) -> None:
    for in_memory in (True, False):
        data = data_of(flowers, mean=[0.25], std=[0.5], in_memory=in_memory)
        plain = data_of(flowers, mean=[0.0], std=[1.0], in_memory=in_memory)
        images, raw = (joined(batches_of(d.test, 4, d, workers=0), 0)[0] for d in (data, plain))  # type: ignore[arg-type]
        torch.testing.assert_close(images, (raw - 0.25) / 0.5)


def test_large_images_are_judged_in_batches_of_training(flowers: Path) -> None:
    shades = TensorDataset(torch.zeros(8, 1, 80, 80), torch.arange(8) % CLASSES)
    some = small_recipe(data={"name": "own", "batch_size": 2, "workers": -1})
    data = own_data({"train": shades, "test": shades}, some.data, CLASSES, 0)
    fed = RunBatches(some, data, torch.device("cpu"), nn.Flatten())
    assert fed.test.batch_size == 2 and fed.images.shape[0] == 2
    assert isinstance(fed.test, LoaderBatches) and fed.test.workers == os.cpu_count()


# --- one item, one stream of random numbers


class Chancy(Dataset[tuple[Tensor, int]]):
    """Items made of the random numbers of torch, NumPy and Python."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        drawn = [row + torch.rand(()).item(), row + np.random.rand(), row + random.random()]
        return torch.tensor(drawn).view(3, 1, 1), row % CLASSES


def test_what_is_random_in_an_item_does_not_depend_on_who_reads_it() -> None:
    data = own_data({"train": Chancy(), "test": Chancy()}, DataConfig("own"), CLASSES, 0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    seen = [joined(batches_of(data.train, 4, data, workers=n, augment=Augment()), 3) for n in (0, 1, 2)]
    for other in seen[1:]:
        assert_same(seen[0], other)
    assert not torch.equal(seen[0][0], joined(batches_of(data.train, 4, data, workers=0, augment=Augment()), 4)[0])
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    whole = batches_of(data.train, 4, data, workers=0, augment=Augment())
    parts = [torch.cat([images for images, _ in whole.parts(3, DistributedContext(rank, 2))]) for rank in range(2)]
    assert sorted(torch.cat(parts).flatten().tolist()) == sorted(seen[0][0].flatten().tolist())


@pytest.mark.parametrize("setting", [{"image_size": 32}, {"in_memory": False}, {"fit": "crop"}, {"middle": 0.5}])
def test_settings_that_are_for_files_are_refused_beside_datasets(setting: dict[str, Any]) -> None:
    (key,) = setting
    with pytest.raises(DataError, match=rf"^data.{key}: own does not use it .*folder\); leave it out$"):
        own_data({"train": Shades(16), "test": Shades(4)}, DataConfig("own", **setting), CLASSES, 0)


def test_files_that_are_no_pictures_are_told_and_hidden_ones_are_not(
    flowers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(flowers, tmp_path / "flowers"))
    before = len(data_of(root).train)
    assert not caplog.records
    folder = sorted((root / "train").iterdir())[0]
    (folder / "._0.png").write_bytes(b"x")
    (folder / "notes.txt").write_text("x")
    picture = Image.new("P", (8, 8), 3)
    picture.save(folder / "more.gif", transparency=3)
    picture.save(folder / "palette.png", transparency=bytes(range(4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data_of(root).train) == before + 2
    assert [record.getMessage() for record in caplog.records] == [f"{root / 'train'}: 1 files are not read (.txt)"]
