"""Data sets are read exactly or refused in one sentence; an epoch follows from seed and number alone."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import test_gpu
from sbf_pruner.errors import DataError
from sbf_pruner.training import DataConfig, load_recipe, phases
from sbf_pruner.training.data import SOURCES, Augment, Data, DeviceBatches, RunBatches, Split, load_data, register


def load(name: str, classes: int = 10, seed: int = 0, **options: Any) -> Data:
    return load_data(DataConfig(name, **options), classes, seed)


def counted(count: int, channels: int = 1, size: int = 4) -> Split:
    """Images that are told apart by every pixel."""
    pixels = torch.arange(count * channels * size * size) % 251
    return Split(pixels.to(torch.uint8).view(count, channels, size, size), torch.arange(count))


def batches(split: Split, batch_size: int, augment: Augment | None = None, seed: int = 0) -> DeviceBatches:
    """Batches that are not normalised, so that pixels can be compared."""
    channels = split.images.shape[1]
    mean, std, classes = [0] * channels, [1 / 255] * channels, len(split)
    return DeviceBatches(split, batch_size, mean, std, augment=augment, seed=seed, num_classes=classes)


def joined(made: DeviceBatches, index: int) -> tuple[Tensor, Tensor]:
    images, labels = zip(*made.epoch(index), strict=True)
    return torch.cat(images), torch.cat(labels)


# --- sources


def test_digits() -> None:
    data = load("digits")
    assert data.train.images.shape == (1297, 1, 8, 8) and data.test.images.shape == (500, 1, 8, 8)
    assert data.train.images.dtype == torch.uint8 and data.train.labels.dtype == torch.int64
    assert not data.validation
    assert data.test.labels.bincount().tolist() == [50, 51, 49, 51, 50, 51, 50, 50, 48, 50]
    assert data.train.images.max() == 240 and not (data.train.images % 15).any()
    assert torch.equal(data.train.images, load("digits", seed=1).train.images)


def test_digits_are_scikit_learns() -> None:
    original = pytest.importorskip("sklearn.datasets").load_digits()
    data = load("digits")
    images = torch.cat([data.train.images, data.test.images]).flatten(1)
    stored = torch.cat([images, torch.cat([data.train.labels, data.test.labels])[:, None]], dim=1)
    expected = np.concatenate([original.data * 15, original.target[:, None]], axis=1).astype(np.int64)
    assert sorted(stored.tolist()) == sorted(expected.tolist())


def test_statistics_are_the_training_images() -> None:
    data = load("synthetic", image_size=8, channels=2, validation=0.25)
    pixels = data.train.images.double() / 255
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert data.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-12)
    images = torch.cat([x for x, _ in DeviceBatches(data.train, 100, data.mean, data.std, device="cpu").epoch(0)])
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(2), rtol=0, atol=1e-5)


def test_synthetic_follows_the_seed_and_can_be_learned() -> None:
    data, same, other = (load("synthetic", 5, seed, image_size=8, samples=200) for seed in (0, 0, 1))
    assert torch.equal(data.train.images, same.train.images) and torch.equal(data.test.labels, same.test.labels)
    assert not torch.equal(data.train.images, other.train.images)
    assert data.train.images.shape == (200, 3, 8, 8) and len(data.test) == 50
    assert data.train.labels.bincount().tolist() == [40] * 5
    train, test = (split.images.flatten(1).float() for split in (data.train, data.test))
    centres = torch.stack([train[data.train.labels == label].mean(0) for label in range(5)])
    assert (torch.cdist(test, centres).argmin(1) == data.test.labels).float().mean() > 0.95


def test_validation_is_held_out_class_by_class() -> None:
    whole, data, again = load("digits"), load("digits", validation=0.1), load("digits", validation=0.1)
    assert (len(data.train), len(data.validation)) == (1167, 130)
    assert set(data.validation.labels.bincount().tolist()) <= {12, 13, 14}
    assert torch.equal(data.validation.images, again.validation.images)
    assert not torch.equal(data.validation.images, load("digits", seed=1, validation=0.1).validation.images)
    rows = torch.cat([data.train.images, data.validation.images]).flatten(1)
    assert sorted(rows.tolist()) == sorted(whole.train.images.flatten(1).tolist())
    assert torch.equal(data.test.images, whole.test.images)


def test_images_are_resized_on_request() -> None:
    data, stored = load("digits", image_size=16), load("digits")
    assert data.train.images.shape == (1297, 1, 16, 16) and data.train.images.dtype == torch.uint8
    expected = F.interpolate(stored.train.images.float(), (16, 16), mode="bilinear")
    assert (data.train.images.float() - expected).abs().max() <= 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digts", {}, r"data.name: no data set is called 'digts'; did you mean 'digits'\?"),
        (
            "digits",
            {"classes": 5},
            r"digits, train: label 9 is outside 0\.\.4; count classes from 0",
        ),
        ("synthetic", {}, r"data.image_size: synthetic needs it, such as 32"),
        ("npz", {}, r"data.path: npz needs it, the .npz file"),
        (
            "digits",
            {"path": "x"},
            r"data.path: digits does not use it .used by: cifar10, npz, folder.; leave it out",
        ),
        ("npz", {"in_memory": False}, r"data.in_memory: npz does not use it .used by: folder.; leave it out"),
        ("npz", {"path": "no/such.npz"}, r"data.path: cannot read no/such.npz: No such file"),
        ("folder", {"path": "x"}, r"data.image_size: folder needs it, such as 32"),
        ("folder", {"image_size": 8}, r"data.path: folder needs it, the folder that holds train and test"),
        (
            "folder",
            {"path": "x", "image_size": 8},
            r"data.path: x does not exist; name the folder that holds train and test",
        ),
        ("digits", {"validation": 0.999}, r"data.validation: 0.999 leaves none of 1297 images to train on"),
        ("digits", {"validation": 1e-4}, r"data.validation: 0.0001 of 1297 images holds none out; raise it"),
    ],
)
def test_what_a_data_set_lacks(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(name, **options)


def test_registered_sources_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbf_pruner.training.data.datasets.SOURCES", dict(SOURCES))
    ones = np.ones((4, 1, 2, 2), np.uint8), np.arange(4)
    register("ones")(lambda config, num_classes, seed: {"train": ones, "test": ones})
    data = load("ones", 4)
    assert data.mean == pytest.approx([1 / 255]) and data.std == (1.0,)


def arrays(**changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    table = {
        "x_train": random.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random.integers(0, 256, (3, 3, 8, 8), dtype=np.uint8),
        "y_test": np.array([0, 1, 2], dtype=np.uint8),
    }
    table.update(changes)
    return {key: value for key, value in table.items() if value is not None}


def load_npz(folder: Path, table: dict[str, Any], **options: Any) -> Data:
    np.savez(folder / "mine.npz", **table)
    return load("npz", 3, path=str(folder / "mine.npz"), **options)


def test_npz_layouts_agree(tmp_path: Path) -> None:
    table = arrays()
    images = torch.from_numpy(table["x_train"])
    assert torch.equal(load_npz(tmp_path, table).train.images, images)
    last = {key: table[key].transpose(0, 2, 3, 1) for key in ("x_train", "x_test")}
    assert torch.equal(load_npz(tmp_path, arrays(**last)).train.images, images)
    floats = {key: table[key].astype(np.float32) / 255 for key in ("x_train", "x_test")}
    assert torch.equal(load_npz(tmp_path, arrays(**floats)).train.images, images)
    grey = {key: table[key][:, 0] for key in ("x_train", "x_test")}
    assert torch.equal(load_npz(tmp_path, arrays(**grey)).train.images, images[:, :1])


def test_npz_with_validation_images(tmp_path: Path) -> None:
    table = arrays(x_val=arrays()["x_test"], y_val=np.array([2, 1, 0]))
    assert load_npz(tmp_path, table).validation.labels.tolist() == [2, 1, 0]
    with pytest.raises(DataError, match=r"data.validation: npz has validation images of its own; set it to 0"):
        load_npz(tmp_path, table, validation=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, r"mine.npz has no array 'y_test'; it holds: x_train, y_train, x_test$"),
        ({"x_val": np.zeros((1, 3, 8, 8), np.uint8)}, r"mine.npz has no array 'y_val'; it holds: "),
        (
            {"x_train": np.zeros((6, 9))},
            r"x_train: shape \(6, 9\) is neither N,H,W nor N,C,H,W nor N,H,W,C with",
        ),
        ({"x_train": np.zeros((6, 9, 8, 8))}, r"x_train: shape \(6, 9, 8, 8\) is neither"),
        ({"x_train": np.zeros((0, 3, 8, 8))}, r"x_train: holds no pixels, its shape is \(0, 3, 8, 8\)"),
        ({"x_train": np.full((6, 3, 8, 8), 2.0)}, r"x_train: floats must lie in \[0, 1\], got 2.0 to 2.0"),
        ({"x_train": np.full((6, 3, 8, 8), np.nan)}, r"x_train: floats must lie in \[0, 1\], got nan"),
        ({"x_train": np.zeros((6, 3, 8, 8), int)}, r"x_train: pixels are int64; store uint8, or floats in"),
        (
            {"x_test": np.zeros((3, 3, 9, 9))},
            r"npz, test: images are \(3, 9, 9\), train's \(3, 8, 8\) \(chan",
        ),
        ({"y_train": np.zeros((6, 1), int)}, r"y_train: expected one label per image, got shape \(6, 1\)"),
        ({"y_train": np.zeros(6)}, r"y_train: labels are float64; store integers"),
        ({"y_train": np.zeros(5, int)}, r"npz, train: 6 images but 5 labels"),
        ({"y_train": np.array([0, 1, 2, 3, 0, 0])}, r"npz, train: label 3 is outside 0\.\.2"),
        ({"y_test": np.array([0, -1, 2])}, r"npz, test: label -1 is outside 0\.\.2"),
        ({"y_train": np.array([{}] * 6)}, r"y_train: holds Python objects, which are never unpickled; store"),
    ],
)
def test_npz_mistakes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_npz(tmp_path, arrays(**changes))


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    for content in (b"", b"not an archive at all", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"odd.npz is not a NumPy .npz archive"):
            load("npz", path=str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match=r"odd.npz holds a single array; save with numpy.savez"):
        load("npz", path=str(path))
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    content[600:900] = bytes(300)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"odd.npz, x_train: the archive is damaged: "):
        load("npz", path=str(path))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 2), ("test", 1)):
        for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / part / label
            folder.mkdir(parents=True)
            (folder / "notes.txt").write_text("not an image")
            for number in range(count):
                image.new("RGB", (10, 6), colour).save(folder / f"{number}.png")
    return tmp_path


def test_folder(pictures: Path) -> None:
    data = load("folder", 2, path=str(pictures), image_size=4)
    assert data.train.images.shape == (4, 3, 4, 4) and data.train.labels.tolist() == [0, 0, 1, 1]
    assert (data.train.images[0, 2] == 255).all() and (data.train.images[0, :2] == 0).all()
    assert data.classes == ("blue", "red")
    grey = load("folder", 2, path=str(pictures), image_size=4, channels=1)
    assert grey.test.images[:, 0, 0, 0].tolist() == [29, 76]


def test_pictures_of_sixteen_bits_are_lowered_to_eight(pictures: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    deep = np.linspace(0, 65535, 16).reshape(4, 4)
    image.fromarray(deep.astype(np.uint16)).save(pictures / "test" / "blue" / "0.png")
    for channels in (1, 3):
        found = load("folder", 2, path=str(pictures), image_size=4, channels=channels).test.images[0]
        assert (found == np.rint(deep / 257).astype(np.uint8)).all()


def test_a_path_may_begin_at_home(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(pictures.parent))
    monkeypatch.setenv("USERPROFILE", str(pictures.parent))  # which is what Windows calls it
    data = load("folder", 2, path=f"~/{pictures.name}", image_size=4)
    assert len(data.train) == 4 and data.classes == ("blue", "red")
    np.savez(pictures / "held.npz", **arrays())
    assert len(load("npz", path=f"~/{pictures.name}/held.npz").train)
    with pytest.raises(DataError, match=rf"data.path: {pictures.parent}/none does not exist"):
        load("cifar10", path="~/none")


def test_folder_mistakes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**options: Any) -> Data:
        return load("folder", 2, **{"path": str(pictures), "image_size": 4, **options})

    with pytest.raises(DataError, match=r"data.channels: folder reads 1 \(grey\) or 3 \(colour\) channels, not 2"):
        read(channels=2)
    with pytest.raises(DataError, match=r"train holds 2 classes \(blue, red\), and model.num_classes is 10; set"):
        load("folder", 10, path=str(pictures), image_size=4)
    (pictures / "test").rename(pictures / "val")
    with pytest.raises(DataError, match=r"has no folder 'test'; .*; rename val to test if it is your test set$"):
        read()
    (pictures / "val").rename(pictures / "test")
    (pictures / "test" / "rde").mkdir()
    with pytest.raises(DataError, match=r"test/rde: train has no class 'rde'; did you mean 'red'\?"):
        read()
    (pictures / "test" / "rde").rmdir()
    torn = pictures / "test" / "red" / "torn.png"
    torn.write_bytes(b"\x89PNG torn")
    with pytest.raises(DataError, match=r"test/red/torn.png is not a readable image \(.*\); replace or remove it$"):
        read()
    torn.unlink()
    (pictures / "train" / "red" / "more").mkdir()
    with pytest.raises(DataError, match=r"train/red/more: images must lie in .*/train/CLASS; move them there"):
        read()
    (pictures / "train" / "red" / "more").rmdir()
    (pictures / "train" / "green").mkdir()
    with pytest.raises(DataError, match=r"train/green holds no images; fill it, or remove it from train and test$"):
        load("folder", 3, path=str(pictures), image_size=4)
    (pictures / "train" / "green").rmdir()
    (pictures / "none" / "train").mkdir(parents=True)
    (pictures / "none" / "test").mkdir()
    with pytest.raises(DataError, match=r"none/train holds no classes; expected .*train/CLASS/\*\.png"):
        read(path=str(pictures / "none"))
    held = {path: path.read_bytes() for path in pictures.glob("test/*/*.png")}
    for path in held:
        path.unlink()
    with pytest.raises(DataError, match=r"test holds no images; expected .*test/CLASS/\*\.png"):
        read()
    for path, content in held.items():
        path.write_bytes(content)
    real_import = builtins.__import__

    def without_pillow(name: str, *rest: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(DataError, match=r"needs Pillow; run: pip install 'sbf-pruner\[images\]'"):
        read()


# --- batches


def test_evaluation_gives_every_image_in_order() -> None:
    split = counted(10)
    made = batches(split, 4)
    assert [len(labels) for _, labels in made.epoch(0)] == [4, 4, 2] and len(made) == 3
    images, labels = joined(made, 0)
    assert torch.equal(labels, split.labels) and images.dtype == torch.float32
    assert torch.equal(images, split.images.float())
    assert torch.equal(images, joined(made, 7)[0])


@pytest.mark.parametrize(("count", "sizes"), [(10, [4, 4]), (8, [4, 4]), (4, [4]), (3, [3])])
def test_training_drops_the_last_part_only_after_a_full_batch(count: int, sizes: list[int]) -> None:
    made = batches(counted(count), 4, Augment())
    assert [len(labels) for _, labels in made.epoch(0)] == sizes and len(made) == len(sizes)


def test_training_shuffles_without_repeats() -> None:
    split = counted(40)
    images, labels = joined(batches(split, 8, Augment()), 0)
    assert sorted(labels.tolist()) == list(range(40)) and labels.tolist() != list(range(40))
    assert torch.equal(images, split.images[labels].float())


def test_an_epoch_is_replayed_from_seed_and_number_alone() -> None:
    split, augment = counted(64, channels=3, size=8), Augment(crop=2, flip=True)
    first = batches(split, 16, augment, seed=3)
    skipped = [joined(first, index) for index in range(3)]
    torch.manual_seed(99)
    resumed = joined(batches(split, 16, augment, seed=3), 2)
    for ours, theirs in zip(skipped[2], resumed, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(skipped[2][1], skipped[1][1])
    assert not torch.equal(joined(batches(split, 16, augment, seed=2), 3)[1], joined(first, 2)[1])
    before = torch.get_rng_state()
    joined(first, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("augment", [Augment(crop=1), Augment(flip=True), Augment(crop=2, flip=True)])
def test_every_image_is_one_crop_or_its_mirror_and_all_occur(augment: Augment) -> None:
    split = counted(500, channels=2, size=5)
    images, labels = joined(batches(split, 50, augment), 0)
    padded, starts = F.pad(split.images[labels], (augment.crop,) * 4).float(), range(2 * augment.crop + 1)
    views = [padded[..., top : top + 5, left : left + 5] for top in starts for left in starts]
    if augment.flip:
        views += [view.flip(-1) for view in views]
    matches = torch.stack([(view == images).flatten(1).all(1) for view in views])
    assert (matches.sum(0) == 1).all() and matches.any(1).all()


@pytest.mark.parametrize("mixup", [0.2, 1.0])
def test_blends_are_of_two_images_of_a_batch_and_their_labels_say_in_which_parts(mixup: float) -> None:
    split = counted(400, channels=2)
    plain, blended = (batches(split, 50, Augment(crop=1, flip=True, mixup=part)) for part in (0.0, mixup))
    kept = []
    for (images, labels), (mixed, parts) in zip(plain.epoch(3), blended.epoch(3), strict=True):
        own = parts.gather(1, labels[:, None])[:, 0]
        other = parts.gather(1, labels.flip(0)[:, None])[:, 0]
        torch.testing.assert_close(own + other, torch.ones(50))
        torch.testing.assert_close(parts.sum(1), torch.ones(50))
        weight = own.view(-1, 1, 1, 1)
        torch.testing.assert_close(mixed, weight * images + (1 - weight) * images.flip(0))
        kept.append(own)
    drawn = torch.cat(kept)
    assert (drawn >= 0).all() and (drawn <= 1).all() and drawn.unique().numel() > 300
    assert drawn.mean() == pytest.approx(0.5, abs=0.06)
    assert drawn.var() == pytest.approx(1 / (8 * mixup + 4), rel=0.25)  # that of Beta(mixup, mixup)
    again = next(batches(split, 50, Augment(crop=1, flip=True, mixup=mixup)).epoch(3))
    assert torch.equal(again[0], next(blended.epoch(3))[0])


@pytest.mark.parametrize("side", [1, 2, 5])
def test_a_square_is_blank_wherever_its_middle_may_be_and_the_rest_is_as_it_was(side: int) -> None:
    split = Split(torch.full((600, 2, 6, 9), 200, dtype=torch.uint8), torch.arange(600))
    made = batches(split, 50, Augment(cutout=side))
    blank = torch.cat([(images == 0) for images, _ in made.epoch(2)])
    assert torch.equal(blank[:, 0], blank[:, 1])  # all channels alike
    first = side // 2
    middles = torch.zeros(6, 9, dtype=torch.bool)
    for hole in blank[:, 0]:
        down, across = (hole.any(axis).nonzero().flatten() for axis in (1, 0))
        assert hole.sum() == len(down) * len(across)  # a rectangle
        spans = []
        for found, size in ((down, 6), (across, 9)):
            low, high = int(found.min()), int(found.max())
            possible = [
                at for at in range(size) if max(at - first, 0) == low and min(at - first + side, size) - 1 == high
            ]
            assert possible  # a square around some pixel, less what the border takes
            spans.append(possible)
        middles[spans[0][0] : spans[0][-1] + 1, spans[1][0] : spans[1][-1] + 1] = True
    assert middles.all()
    whole = torch.cat([images for images, _ in batches(split, 50, Augment()).epoch(2)])
    cut = torch.cat([images for images, _ in made.epoch(2)])
    assert torch.equal(cut, torch.where(blank, 0.0, whole))


def test_a_hole_as_wide_as_the_image_is_refused() -> None:
    recipe = load_recipe("digits", ["weights.cutout=8"])
    said = r"^weights\.cutout: a hole of 8 pixels may cover a whole image \(8x8\); lower it$"
    with pytest.raises(DataError, match=said):
        RunBatches(recipe, load_data(recipe.data, 10, 0), torch.device("cpu"), nn.Flatten())


def test_a_crop_that_may_leave_nothing_of_the_image_is_refused() -> None:
    recipe = load_recipe("digits", ["data.crop=8"])
    with pytest.raises(DataError, match=r"^data\.crop: a shift by 8 pixels .* \(8x8\); lower it$"):
        RunBatches(recipe, load_data(recipe.data, 10, 0), torch.device("cpu"), nn.Flatten())


@pytest.mark.parametrize("way", test_gpu.WAYS)
def test_what_is_tried_on_a_gpu_fits_its_images(way: str) -> None:
    recipe = load_recipe("digits", [*test_gpu.SHORT, *test_gpu.WAYS[way]])
    assert len(RunBatches(recipe, load_data(recipe.data, 10, 0), torch.device("cpu"), nn.Flatten()).images)


def test_phases_cut_and_blend_only_what_they_ask_for_and_norms_see_whole_images() -> None:
    recipe = load_recipe("digits", ["finetune.mixup=1", "finetune.batch_size=64", "warmup.cutout=3"])
    feed = RunBatches(recipe, load_data(recipe.data, 10, 0), torch.device("cpu"), nn.Flatten())
    for phase in phases(recipe):
        labels = next(feed.of(phase).epoch(0))[1]
        assert labels.is_floating_point() == (phase.kind == "finetune")
        whole = torch.equal(next(feed.of(phase).epoch(0))[0], next(feed.whole(phase).epoch(0))[0])
        assert whole == (phase.kind in ("score", "weights"))
        images, labels = next(feed.whole(phase).epoch(0))
        assert not labels.is_floating_point() and len(images) == feed.of(phase).batch_size
        assert feed.whole(phase).images.data_ptr() == feed.of(phase).images.data_ptr()


def test_pixels_are_normalised_per_channel() -> None:
    split = counted(3, channels=2)
    made = DeviceBatches(split, 3, [0.25, 0.5], [0.5, 2.0], device="cpu")
    scaled = split.images.float() / 255
    expected = torch.stack([(scaled[:, 0] - 0.25) / 0.5, (scaled[:, 1] - 0.5) / 2.0], dim=1)
    torch.testing.assert_close(next(made.epoch(0))[0], expected)


def test_the_split_itself_is_not_changed() -> None:
    split = counted(8)
    before = split.images.clone()
    joined(batches(split, 4), 0)
    joined(batches(split, 4, Augment(crop=1, flip=True)), 0)
    assert torch.equal(split.images, before)
