"""Several processes that train one network come to what one would; only the first of them speaks and writes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sbf_pruner
from sbf_pruner import Pruner, Scores
from sbf_pruner.cli import main
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.training import check_divisible, load_recipe
from sbf_pruner.utils import DistributedContext, read_tensors
from shares import mostly_slow

PREPARED = """
import atexit, os, sys
from pathlib import Path
import torch
from torch import nn
torch.set_num_threads(1)
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

@atexit.register  # the first of them is the last to be run
def no_thread_may_be_left():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if any("gloo" in name for name in names):
        print("these threads may abort the process once the interpreter has ended:", names, flush=True)
        os._exit(1)
"""


def together(work: str, folder: Path, count: int = 2) -> list[str]:
    """Let several processes do the same, as torchrun would; what each of them said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = folder / "work.py"
    script.write_text(PREPARED + textwrap.dedent(work))
    paths = [str(Path(sbf_pruner.__file__).parents[1]), *map(str, Path(__file__).parents[:2])]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **shared, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    said = [child.communicate(timeout=120)[0] for child in children]
    for child, text in zip(children, said, strict=True):
        assert child.returncode == 0, text
    return said


def scored_net() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten(), nn.Linear(80, 4)
    )
    return net, torch.rand(8, 3, 8, 8), torch.randint(0, 4, (8,))


def check_team() -> None:
    """Sums, means, and what the first one says."""
    rank = int(os.environ["RANK"])
    team = DistributedContext.present()
    assert team == DistributedContext(rank, 2) and team.leads == (rank == 0)
    sums = torch.tensor([1.0, rank])
    team.all_reduce_sum(sums)
    assert sums.tolist() == [2.0, 1.0]
    mixed = [torch.full((2, 3), float(rank)), torch.tensor(rank, dtype=torch.float64)]
    turned = torch.arange(6.0).view(1, 2, 3, 1).contiguous(memory_format=torch.channels_last) * (1 + rank)
    team.average([*mixed, turned])
    assert mixed[0].tolist() == [[0.5] * 3] * 2 and mixed[1].item() == 0.5
    assert turned.flatten().tolist() == [1.5 * each for each in range(6)]
    counts = torch.tensor([rank + 7])
    team.follow([counts])
    assert counts.item() == 7
    assert team.run_on_rank0(lambda: os.environ["RANK"]) == "0"
    try:
        team.run_on_rank0(lambda: [][0])
    except IndexError:
        assert rank == 0
    except PruningError as error:
        assert rank == 1 and str(error) == "list index out of range"
    assert team.all_ranks_agree("yes") and not team.all_ranks_agree(rank)


def score(net: nn.Module, pruner: Pruner, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    with pruner.scoring():
        for _ in range(3):
            (nn.functional.cross_entropy(net(images), labels) + pruner.penalty()).backward()
            pruner.step()
    return pruner.scores()


def test_scores_of_a_loop_of_ones_own_follow_the_images_of_all_processes(tmp_path: Path) -> None:
    work = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from sbf_pruner import Pruner, Scores
    from test_distributed import check_team, score, scored_net

    dist.init_process_group("gloo")
    check_team()
    net, images, labels = scored_net()
    with torch.no_grad():
        net[0].weight += rank  # as if it had been made with another seed
    pruner = Pruner(net, images[:1], scores=Scores(penalty=0.05, speed=0.1))
    trained = DistributedDataParallel(net)  # and so all have the weights of the first
    scores = score(net, pruner, images[rank::2], labels[rank::2])
    with pruner.gated():
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(images[rank::2]), labels[rank::2]).backward()
            optimizer.step()
    torch.save([scores, [p.detach() for p in net.parameters()]], folder / f"{rank}.pt")
    del trained  # it holds the group
    dist.destroy_process_group()
    """
    together(work, tmp_path)
    (ours, weights), (theirs, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    net, images, labels = scored_net()
    alone = score(net, Pruner(net, images[:1], scores=Scores(penalty=0.05, speed=0.1)), images, labels)
    assert min(held.min() for held in alone.values()) < 0.9  # they have moved
    for name, held in alone.items():
        assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours[name], held)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


BAD_ITEM = """
import torch
from torch import nn
from torch.utils.data import Dataset

def net(num_classes, in_channels):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))

class Items(Dataset):
    def __init__(self, torn):
        self.torn = torn

    def __len__(self):
        return 32

    def __getitem__(self, row):
        if row == self.torn:
            raise OSError("the disk")
        return torch.zeros(1, 8, 8), row % 10

def datasets(seed):
    return {"train": Items(seed), "test": Items(None)}
"""


# The seed says which item is torn, and when each is read: the second process reads row 5, the first one the others.
@pytest.mark.parametrize("row", mostly_slow([5, 6, 7], [5]))
def test_an_item_that_a_process_cannot_read_is_told_once(row: int, tmp_path: Path) -> None:
    work = """
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    from sbf_pruner.cli import main
    from test_distributed import SHORT

    own = ["data.name=bad_items:datasets", "data.workers=0", "data.batch_size=4", f"seed={folder.name}"]
    own += ["model.name=bad_items:net"]
    code = main(["run", "digits", "--quiet", *(word for each in SHORT + own for word in ("--set", each))])
    print("code", code)
    """
    folder = tmp_path / str(row)
    folder.mkdir()
    (folder / "bad_items.py").write_text(BAD_ITEM)
    said = together(work, folder)
    sentence = f"sbf: bad_items:datasets, train, item {row} cannot be read (OSError: the disk); repair or remove it"
    assert "".join(said).count(sentence) == 1 and "Traceback" not in "".join(said), said
    assert any("code 2" in each for each in said)
    assert (sentence in said[1]) == (row == 5)


SHORT = [
    *("phases.warmup=1", "phases.cycles=1", "phases.score=1", "phases.weights=1", "phases.finetune=1"),
    *("dense_control=false", "budget.macs=0.6", "scores.speed=0.01", "warmup.ema=0.9", "data.batch_size=100"),
]


def plain_net() -> nn.Module:
    """Without norms, several processes compute what one does."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "model.safetensors", "")[0]


def test_a_run_of_two_processes_is_that_of_one_and_goes_on_when_cut_off(tmp_path: Path) -> None:
    work = """
    import signal
    from sbf_pruner import fit
    from sbf_pruner.errors import Stopped
    from sbf_pruner.training import RunFolder, load_recipe
    from sbf_pruner.training.run import Run
    from test_distributed import SHORT, plain_net

    def run(name, **options):
        def report(record):
            print(record["done"])
        return fit(plain_net(), load_recipe("digits", SHORT), run=folder / name, report=report, **options)

    result = run("two")
    print("kept", sorted(result.plan.keep.items()), result.folder.name, result.summary["processes"])
    after_step, append = Run._after_step, RunFolder.append

    def signalled(held, phase, step, steps):
        if rank == 1 and held.done == 1 and step == 1:
            signal.raise_signal(signal.SIGTERM)
        after_step(held, phase, step, steps)

    def cut_off(held, record):
        append(held, record)
        if record["done"] == 3:
            raise KeyboardInterrupt

    Run._after_step = signalled
    try:
        run("cut")
    except Stopped as stopped:
        print(stopped.saved)
    RunFolder.append, Run._after_step = cut_off, after_step
    try:
        run("cut", resume=True)
    except KeyboardInterrupt:
        print("cut off")
    RunFolder.append = append
    run("cut", resume=True)
    assert run("cut", resume=True).was_finished
    """
    first, second = (said.splitlines() for said in together(work, tmp_path))
    alone = sbf_pruner.fit(plain_net(), load_recipe("digits", SHORT), run=tmp_path / "one")
    told = f"kept {sorted(alone.plan.keep.items())} two 2"
    assert first == [*"1234", told, *"12", "saved after epoch 2", "cut off", *"34"]
    assert second == [told, "saved after epoch 2", "cut off"], "the others come to the same, and are told no epochs"
    ours, theirs, resumed = (weights(tmp_path / name) for name in ("one", "two", "cut"))
    for name, held in ours.items():
        torch.testing.assert_close(theirs[name], held, rtol=1e-3, atol=1e-5)
        assert torch.equal(resumed[name], theirs[name])
    kept = [sorted(path.name for path in (tmp_path / name).rglob("*")) for name in ("one", "two", "cut")]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.batch_size=50"], "data.batch_size: a batch of 50 images cannot be shared by 4 processes"),
        (["budget.latency=0.5"], "budget.latency: .* in one process, but 4 are running; set macs or params"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes: list[str], said: str) -> None:
    recipe = load_recipe("digits", changes)
    check_divisible(recipe, 1000, DistributedContext())
    with pytest.raises(RunError, match=said):
        check_divisible(recipe, 1000, DistributedContext(0, 4))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_speaks(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["inspect", "resnet20"]) == 2
    said = "sbf: sbf inspect works in one process, and 2 were started; leave torchrun out\n"
    assert capsys.readouterr() == ("", "" if rank else said)
