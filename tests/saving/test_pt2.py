"""torch.export archives: written plainly, read back, and never a way to run somebody's code."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from sbf_pruner.errors import RunError
from sbf_pruner.runtimes import export_program
from sbf_pruner.saving import _CHECKED, _OPERATORS, read_program, write_program


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()


@pytest.fixture(scope="module")
def archive(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "network.pt2"
    write_program(export_program(network, torch.rand(2, 3, 6, 6)), path)
    return path


def changed(archive: Path, tmp_path: Path, edit) -> Path:
    """A copy of the archive after `edit` has had its members in its hands."""
    with zipfile.ZipFile(archive) as held:
        members = {info.filename: held.read(info) for info in held.infolist()}
    root = next(iter(members)).partition("/")[0]
    edit(members, root)
    path = tmp_path / "network.pt2"
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    return path


def program_of(members, root):
    return json.loads(members[f"{root}/models/model.json"])


def test_what_is_written_is_read_back(network, archive):
    again = read_program(archive)
    for batch in (1, 5):
        images = torch.rand(batch, 3, 6, 6)
        torch.testing.assert_close(again(images), network(images), rtol=0, atol=1e-6)


def test_the_archive_names_no_folder_of_this_machine_and_holds_no_pickle(archive):
    with zipfile.ZipFile(archive) as held:
        for info in held.infolist():
            content = held.read(info)
            assert b"site-packages" not in content and not content.startswith(b"\x80")


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def pickled(path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Payload(path), buffer)
    return buffer.getvalue()


def refused(path, match):
    with pytest.raises(RunError, match=match):
        read_program(path)


def test_torch_itself_would_run_the_payload(archive, tmp_path):
    """So that the tests below are about something."""
    trap = tmp_path / "trap"

    def edit(members, root):
        members[f"{root}/data/sample_inputs/model.pt"] = pickled(trap)

    path = changed(archive, tmp_path, edit)
    with pytest.raises(Exception):  # noqa: B017
        torch.export.load(path)
    assert trap.exists()


def test_pickled_inputs_are_not_read(archive, tmp_path):
    trap = tmp_path / "trap"
    path = changed(
        archive, tmp_path, lambda m, root: m.update({f"{root}/data/sample_inputs/model.pt": pickled(trap)})
    )
    refused(path, r"network\.pt2 is not read, because it holds pickled inputs; nothing in it was run")
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_tensors_are_not_read(archive, tmp_path, kind):
    trap = tmp_path / "trap"

    def edit(members, root):
        name = f"{root}/data/{kind}/model_{kind}_config.json"
        config = json.loads(members[name])
        entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
        config["config"]["0.weight"] = entry
        members[name] = json.dumps(config).encode()
        members[f"{root}/data/weights/weight_0"] = pickled(trap)

    refused(changed(archive, tmp_path, edit), "its tensor '0.weight' is pickled")
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["data/aotinductor/model/lib.so", "data/constants/custom_obj_0", "../../evil", "code.py", "extra/x"]
)
def test_members_that_no_network_needs_are_refused(archive, tmp_path, name):
    path = changed(archive, tmp_path, lambda m, root: m.update({f"{root}/{name}": pickle.dumps(1)}))
    refused(path, "which no network needs")


def edited_program(archive, tmp_path, edit):
    def change(members, root):
        program = program_of(members, root)
        edit(program)
        members[f"{root}/models/model.json"] = json.dumps(program).encode()

    return changed(archive, tmp_path, change)


@pytest.mark.parametrize(
    "target",
    [
        *("torch.os.system", "os.system", "builtins.eval", "torch.ops.aten.from_file.default", "torch.load"),
        *("_operator.methodcaller", "torch.ops.aten.save.default", "torch.ops.loaded.evil.default"),
        # These take sizes and indices on trust.
        "torch.ops.aten.max_pool2d_with_indices_backward.default",
        "torch.ops.aten.upsample_nearest2d.default",
        "torch.ops.aten.native_batch_norm.default",
        "torch.ops.aten.relu.out",
        "torch.ops.aten.div.Tensor_mode",
    ],
)
def test_operators_that_do_more_than_compute_are_refused(archive, tmp_path, target):
    def edit(program):
        program["graph_module"]["graph"]["nodes"][0]["target"] = target

    refused(
        edited_program(archive, tmp_path, edit),
        f"'{re.escape(target)}' is not one of the allowed operators; nothing in it was run",
    )


def test_the_operators_that_are_read_exist_and_write_nowhere_else():
    for name in (*_OPERATORS, *_CHECKED):
        packet, _, overload = name.partition(".")
        schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
        assert not any(argument.is_out or "file" in argument.name for argument in schema.arguments), name


def test_a_network_with_another_operator_is_not_written(tmp_path):
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x).abs()

    with pytest.raises(RunError, match=r"network\.pt2 is not written, .*'torch\.ops\.aten\.fft_fft\..*--formats"):
        write_program(export_program(Spectrum(), torch.rand(2, 5, 4)), tmp_path / "network.pt2")
    assert not list(tmp_path.iterdir())


class Trusting(nn.Module):
    """Calls the operators that do not check the sizes of their arguments."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.uniform_()
        self.free = nn.InstanceNorm1d(6)
        self.direction, self.size = nn.Parameter(torch.rand(5, 6)), nn.Parameter(torch.rand(5, 1))

    def forward(self, x):
        maps = self.free(self.norm(self.lstm(x)[0].transpose(1, 2)))
        return torch.nn.functional.linear(maps.mean(2), torch._weight_norm(self.direction, self.size))


@pytest.mark.parametrize("decomposed", [False, True])
def test_operators_that_do_not_check_sizes_are_checked(tmp_path, decomposed):
    network, images, path = Trusting().eval(), torch.rand(2, 7, 4), tmp_path / "network.pt2"
    program = export_program(network, images)
    write_program(program.run_decompositions({}) if decomposed else program, path)
    again = read_program(path)
    for inputs in (images, torch.rand(5, 7, 4)):
        torch.testing.assert_close(again(inputs), network(inputs), rtol=0, atol=1e-6)
    for name, parameter in network.named_parameters():
        forged = read_program(path)
        owner, _, last = name.rpartition(".")
        setattr(forged.get_submodule(owner), last, nn.Parameter(parameter.detach()[:2]))
        with pytest.raises(RuntimeError, match=r"do not fit|should contain|must match"):
            forged(images)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('trap').touch()",
        "Symbol('x').__class__",
        "eval('1')",
        "Symbol(open('trap', 'w'))",
        "[x for x in ()]",
        "(" * 300,
        "Pow(Integer(99999999), Integer(99999999))",
        "Pow(Pow(Pow(Integer(9), Integer(4)), Integer(4)), Integer(4))",
        "Pow(Add(Symbol('a'), Symbol('b')), Integer(4))",
        "Add(" + ", ".join(["Symbol('a')"] * 100) + ")",
        "Mul(" + ", ".join(["Add(Symbol('a'), Symbol('b'))"] * 13) + ")",
        "Min(Mod(Symbol('a'), Integer(5)), Max(FloorDiv(Symbol('a'), Integer(3)), Mod(Symbol('a'), Integer(9))))",
    ],
)
def test_expressions_are_arithmetic_of_sizes(archive, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)

    def edit(program):
        values = program["graph_module"]["graph"]["tensor_values"].values()
        sizes = [size for value in values for size in value["sizes"] if "as_expr" in size]
        sizes[0]["as_expr"]["expr_str"] = text

    refused(edited_program(archive, tmp_path, edit), "its expr_str is ")
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("space", ["", " "])
def test_expressions_are_few(archive, tmp_path, space):
    def change(members, root):
        program = program_of(members, root)
        value = next(iter(program["graph_module"]["graph"]["tensor_values"].values()))
        value["sizes"] = [{"as_expr": {"expr_str": f"Integer({n})", "hint": None}} for n in range(300)]
        text = json.dumps(program).replace('"expr_str":', f'"expr_str"{space}:')
        members[f"{root}/models/model.json"] = text.encode()

    refused(changed(archive, tmp_path, change), "it has more than 200 expressions")


class Attention(nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.key, self.value = nn.Parameter(torch.rand(1, 1, 3, 8)), nn.Parameter(torch.rand(1, 1, values, 8))

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, self.key, self.value, is_causal=True)


def test_attention_with_more_values_than_keys_does_not_read_beyond_its_tensors(tmp_path):
    network, x, path = Attention(3).eval(), torch.rand(1, 1, 6, 8), tmp_path / "network.pt2"
    write_program(torch.export.export(network, (x,)), path)
    torch.testing.assert_close(read_program(path)(x), network(x), rtol=0, atol=1e-6)
    write_program(torch.export.export(Attention(4_000).eval(), (x,)), path)
    forged = read_program(path)
    with pytest.raises(RuntimeError, match="query, key, value and mask of an attention do not fit each other"):
        forged(x)


def test_names_guards_notes_and_nests_are_plain(archive, tmp_path):
    def first_node(program):
        return program["graph_module"]["graph"]["nodes"][0]

    def rename(program):
        first_node(program)["outputs"][0]["as_tensor"]["name"] = "x = __import__('os')"

    def note(program):
        first_node(program)["metadata"] = {"stack_trace": "anything"}

    def guard(program):
        program["guards_code"] = ["print(1)"]

    def nest(program):
        signature = next(c["signature"] for c in program["graph_module"]["module_call_graph"] if c["signature"])
        signature["in_spec"] = signature["in_spec"].replace("builtins.tuple", "os.system")

    refused(edited_program(archive, tmp_path, rename), "its name is ")
    refused(edited_program(archive, tmp_path, note), "it has metadata")
    refused(edited_program(archive, tmp_path, guard), "it has guards_code")
    refused(edited_program(archive, tmp_path, nest), "its in_spec is ")


@pytest.mark.parametrize(
    "spec",
    [
        *("5", "null", "[]", "{}", '"ab"', "[1]", "[1, 5]", "[1, null]", "[1, [], 2]", "no JSON", "[" * 5000),
        *(f'[1, {{"type": {kind}, "context": null, "children_spec": []}}]' for kind in ("[]", "{}", "5", "[[1]]")),
        *(f'[1, {{"type": null, "context": null, "children_spec": {held}}}]' for held in ("null", "5", "[5]")),
        '[1, {"type": null, "context": [], "children_spec": []}]',
        "[1, " + '{"type": null, "context": null, "children_spec": [' * 300 + "5" + "]}" * 300 + "]",
    ],
    ids=lambda spec: spec[:60],
)
def test_nests_are_of_the_kind_they_should_be(archive, tmp_path, spec):
    def edit(program):
        signature = next(c["signature"] for c in program["graph_module"]["module_call_graph"] if c["signature"])
        signature["in_spec"] = spec

    refused(edited_program(archive, tmp_path, edit), "its in_spec is .*; nothing in it was run")


@pytest.mark.parametrize("kind", ["weights", "constants"])
@pytest.mark.parametrize("held", [[], None, 5, "text", [["0.weight", {}]]])
def test_tensors_are_listed_by_name(archive, tmp_path, kind, held):
    def edit(members, root):
        members[f"{root}/data/{kind}/model_{kind}_config.json"] = json.dumps({"config": held}).encode()

    refused(
        changed(archive, tmp_path, edit), f"its model_{kind}_config.json lists no tensors; nothing in it was run"
    )


@pytest.mark.parametrize(
    ("name", "depth", "match"),
    [
        ("models/model.json", 150, "because it is nested deeper than any network; nothing in it was run"),
        ("models/model.json", 100_000, "has no readable models/model.json"),
        (
            "data/weights/model_weights_config.json",
            100_000,
            "has no readable data/weights/model_weights_config.json",
        ),
    ],
)
def test_texts_nested_without_end_are_refused(archive, tmp_path, name, depth, match):
    content = b'{"config": ' + b"[" * depth + b"]" * depth + b"}"
    refused(changed(archive, tmp_path, lambda m, root: m.update({f"{root}/{name}": content})), match)


def test_an_archive_whose_names_are_no_text_is_damaged(archive, tmp_path):
    content, path = bytearray(archive.read_bytes()), tmp_path / "network.pt2"
    content[content.index(b"PK\x01\x02") + 46] = 0xFF  # where the first name in the table begins
    path.write_bytes(content)
    refused(path, "is damaged or cut short")


def test_nothing_is_inflated(archive, tmp_path):
    """torch compresses nothing, and a few bytes may stand for gigabytes."""
    path = tmp_path / "network.pt2"
    with zipfile.ZipFile(archive) as held, zipfile.ZipFile(path, "w") as new:
        for info in held.infolist():
            new.writestr(info, held.read(info))
        new.writestr("network/data/weights/weight_99", bytes(2**26), zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    refused(path, "it is compressed")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_members_that_share_their_bytes_are_refused(archive, tmp_path):
    """Many names for one place of the file would be read as many times."""
    path = tmp_path / "network.pt2"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("network/models/model.json", bytes(10_000))
        shared = packed.infolist()[0]
        for number in range(100):
            again = copy.copy(shared)
            again.filename = f"network/data/weights/weight_{number}"
            packed.filelist.append(again)
    refused(path, "it is compressed|is damaged")


def test_damaged_archives_are_named(archive, tmp_path):
    path = tmp_path / "network.pt2"
    path.write_bytes(archive.read_bytes()[:-200])
    refused(path, "is damaged or cut short")
    path.write_bytes(b"nothing of the kind")
    refused(path, "is damaged or cut short")
    refused(tmp_path / "none.pt2", "cannot be read")
    refused(
        changed(archive, tmp_path, lambda m, root: m.pop(f"{root}/models/model.json")), "has no readable models"
    )


def test_a_program_of_another_version_says_what_else_there_is(archive, tmp_path):
    def edit(program):
        program["schema_version"]["major"] = 1

    refused(edited_program(archive, tmp_path, edit), r"written by torch .*; use the ONNX file, or give")
