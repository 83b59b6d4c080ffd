"""The paper's table: every network, ratio and seed of benchmarks/cifar10.toml on one device.

python benchmarks/cifar10.py start --at-once 4    starts the driver, which goes on alone; again after a kill
python benchmarks/cifar10.py status               one line per run
python benchmarks/cifar10.py pack runs.tar        what is needed to go on elsewhere; unpack brings it back
python benchmarks/cifar10.py collect              finished runs into benchmarks/results, by the name of the jobs
python benchmarks/cifar10.py stop                 ends the driver and all runs; start goes on with them

Only torch, NumPy and safetensors are needed, and this source tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from driver import ENDING_SECONDS, Driver, read_told  # noqa: E402
from jobs import read_runs, status_line  # noqa: E402
from locks import end_holders, holder, is_locked, take_lock  # noqa: E402

LOCK = "driver.lock"
DETACHED_SECONDS = 60.0  # to say that it works


def main(given: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if given is None else given)
    arguments = _parser().parse_args(words)
    root = Path(arguments.root).resolve()
    if arguments.command == "stop":
        return _end(root)
    runs = read_runs(Path(arguments.jobs), root, arguments.only)
    if arguments.command == "start":
        return _detach(root, words)
    if arguments.command == "work":
        lock = take_lock(root / LOCK, patience=1.0)  # held until this process ends
        if lock is None:
            print(f"a driver works on {root} already (process {holder(root / LOCK)})")
            return 2
        os.write(lock, f"{os.getpid()}\n".encode())
        return Driver(runs, root, arguments.at_once, arguments.stagger, not arguments.no_mps).work()
    if arguments.command == "status":
        told = read_told(root)
        process = f"process {holder(root / LOCK)}, {told['at_once']} at once"
        print(f"driver: {process if is_locked(root / LOCK) else 'not running'}")
        for run in runs:
            print(status_line(run, told["failed"].get(run.name)))
        return 0
    if arguments.command == "collect":
        from collecting import collect

        from sbf_pruner.errors import PruningError

        try:
            new = collect(runs, Path(arguments.results or HERE / "results" / f"{Path(arguments.jobs).stem}.json"))
        except PruningError as error:
            print(error)
            return 2
        print(f"{sum(run.finished for run in runs)} runs finished, new: {', '.join(new) or 'none'}")
        return 0
    import packing

    if arguments.command == "pack":
        sizes = packing.pack(runs, Path(arguments.file))
        for name, size in sizes.items():
            print(f"{name:<44} {size / 1e6:6.1f} MB" if size else f"{name:<44} left out: its checkpoint is damaged")
        print(f"{len(sizes)} runs, {sum(sizes.values()) / 1e6:.1f} MB")
        return 0
    for name, what in packing.unpack(Path(arguments.file), root).items():
        print(f"{name:<44} {what}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("start", "work", "status", "stop", "pack", "unpack", "collect"):
        command = commands.add_parser(name)
        command.add_argument("--jobs", default=str(HERE / "cifar10.toml"), help="the file of jobs")
        command.add_argument("--root", default="runs/cifar10", help="the folder of the runs")
        command.add_argument("--only", action="append", default=[], metavar="PATTERN", help="runs called like this")
        if name in ("start", "work"):
            command.add_argument("--at-once", type=_count, default=4, help="how many runs at a time")
            command.add_argument("--stagger", type=float, default=0.0, help="seconds between two starts")
            command.add_argument("--no-mps", action="store_true", help="without CUDA's multi-process service")
        if name in ("pack", "unpack"):
            command.add_argument("file", help="the tar file")
        if name == "collect":
            command.add_argument("--results", help="the file to add to; without it, that of the jobs' name")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _detach(root: Path, words: list[str]) -> int:
    """Start the driver in a session of its own, and see that it works."""
    if is_locked(root / LOCK):
        print(f"a driver works on {root} already (process {holder(root / LOCK)})")
        return 0
    root.mkdir(parents=True, exist_ok=True)
    with (root / "driver.log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, str(HERE / "cifar10.py"), "work", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + DETACHED_SECONDS
    while time.monotonic() < until:
        if holder(root / LOCK) == driver.pid:
            print(f"driver: process {driver.pid}, log {root / 'driver.log'}")
            return 0
        if driver.poll() is not None:
            print(f"driver: ended with {driver.returncode}, see {root / 'driver.log'}")
            return driver.returncode
        time.sleep(0.1)
    print(f"driver: says nothing, see {root / 'driver.log'}")
    return 1


def _end(root: Path) -> int:
    """End the driver, which ends its runs, then what goes on though its driver was killed."""
    held = end_holders([root / LOCK], 2 * ENDING_SECONDS) or end_holders(root.glob("locks/*"), ENDING_SECONDS)
    for path in held:
        print(f"process {holder(path)} does not end ({path})")
    return 1 if held else 0


if __name__ == "__main__":
    sys.exit(main())
