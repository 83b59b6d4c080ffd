"""Many runs on one device, several at a time, by a driver that may be killed at any moment.

Runs enter; their folders are filled.  The driver starts the next run as one ends, resumes what was cut off and
leaves alone what is finished.  It keeps no state that matters: killed and started again, it finds the runs
that went on without it by the locks they hold, and takes up the rest from their checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs import Run
from locks import end_holders, take_lock

SOURCE = Path(__file__).resolve().parent.parent / "src"
WRONG_USAGE = 2  # exit code of a run that would fail again
TRIES = 3  # of a run that fails without getting any further
POLL_SECONDS = 1.0
ENDING_SECONDS = 30.0
TOLD = "driver.json"


class Driver:
    """Runs what it is given, `at_once` at a time, in their order."""

    def __init__(self, runs: Sequence[Run], root: Path, at_once: int, stagger: float, mps: bool) -> None:
        self.runs, self.root, self.at_once, self.stagger, self.mps = list(runs), root, at_once, stagger, mps
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.tries: dict[str, tuple[int, int]] = {}  # how often, and how far it was then
        self.failed: dict[str, int] = {}
        self.started = -float("inf")
        self.stopped = False

    def work(self) -> int:
        """Run everything; 0 if all of it is finished in the end, else 1."""
        signal.signal(signal.SIGTERM, self._stop)
        server = _mps_server(self.root) if self.mps else {}
        environment = {**os.environ, **server, **_settings(self.root, self.at_once)}
        try:
            self._tell()
            while not self.stopped and self._advance(environment):
                time.sleep(POLL_SECONDS)
        finally:
            self._end_all()
            if server:
                _mps_quit(server)
        return 0 if all(run.finished for run in self.runs) else 1

    def _advance(self, environment: dict[str, str]) -> bool:
        """Take note of what ended and start what may start; is there anything left to wait for?"""
        for run in self.runs:
            child = self.children.get(run.name)
            if child is not None and child.poll() is not None:
                del self.children[run.name]
                self._ended(run, child.returncode)
        going = [run for run in self.runs if run.name in self.children or run.going_on]
        waiting = [
            run for run in self.runs if run not in going and not run.finished and run.name not in self.failed
        ]
        waiting.sort(key=lambda run: not run.begun)  # what was cut off first
        startable = [run for run in waiting if not run.waits_for]
        while startable and len(going) < self.at_once and time.monotonic() >= self.started + self.stagger:
            run = startable.pop(0)
            if self._start(run, environment):
                self.started = time.monotonic()
                self._say(f"{run.name} goes on" if run.begun else f"{run.name} starts")
            going.append(run)
        if not going and not startable:  # what the others wait for has failed, or nobody was asked to run it
            for run in waiting:
                self._say(f"{run.name} cannot start without {', '.join(run.waits_for)}")
        return bool(going or startable)

    def _end_all(self) -> None:
        """End the runs: our own, and those an earlier driver left to us."""
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            try:
                child.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
        end_holders((run.lock for run in self.runs), ENDING_SECONDS)

    def _start(self, run: Run, environment: dict[str, str]) -> bool:
        """Start a run; where it is going on already, or cannot even be asked for, nothing is started."""
        try:
            words = run.words()
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._say(f"{run.name} cannot start: the run it stands beside is damaged ({error!r})")
            self.failed[run.name] = WRONG_USAGE
            self._tell()
            return False
        lock = take_lock(run.lock)
        if lock is None:
            return False
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            # The child inherits the lock, and has it for as long as it lives, with or without us.
            child = subprocess.Popen(
                [sys.executable, "-m", "sbf_pruner", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **run.environment},
                pass_fds=[lock],
                start_new_session=True,
            )
        self.children[run.name] = child
        run.lock.write_text(f"{child.pid}\n", "utf-8")
        os.close(lock)
        return True

    def _ended(self, run: Run, code: int) -> None:
        self._say(f"{run.name} ended with {code}")
        done = len(run.records())
        tries, before = self.tries.get(run.name, (0, -1))
        tries = 1 if done > before else tries + 1
        self.tries[run.name] = tries, done
        if code == WRONG_USAGE or (not run.finished and tries >= TRIES):
            self.failed[run.name] = code
        self._tell()

    def _tell(self) -> None:
        path = self.root / TOLD
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"at_once": self.at_once, "failed": self.failed}) + "\n", "utf-8")
        partial.replace(path)

    def _stop(self, *_: object) -> None:
        self.stopped = True  # seen between two steps: a run is either started, with its lock, or not

    def _say(self, text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, flush=True)


def read_told(root: Path) -> dict[str, Any]:
    """What the last driver said of itself."""
    told: dict[str, Any] = {"at_once": 0, "failed": {}}
    with suppress(OSError, ValueError):
        told |= json.loads((root / TOLD).read_text("utf-8"))
    return told


def _settings(root: Path, at_once: int) -> dict[str, str]:
    """The environment of a run: this source tree, its share of the processors, compiled kernels kept."""
    share = str(max(1, (os.cpu_count() or 1) // at_once))
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", share),
        "TORCHINDUCTOR_CACHE_DIR": str((root / "cache").resolve()),
    }


def _mps_server(root: Path) -> dict[str, str]:
    """Start CUDA's multi-process service where there is one; the environment that makes a run use it.

    Drivers of other runs have services of their own, as whoever ends first ends his.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return {}
    whose = zlib.crc32(str(root.resolve()).encode())
    folder = Path(tempfile.gettempdir()) / f"sbf-mps-{os.getuid()}-{whose:08x}"
    places = {f"CUDA_MPS_{kind}_DIRECTORY": str(folder / kind.lower()) for kind in ("PIPE", "LOG")}
    for place in places.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    # One that runs already refuses to be started twice, and serves as well.
    subprocess.run([control, "-d"], env={**os.environ, **places}, check=False, stdin=subprocess.DEVNULL)
    return places


def _mps_quit(places: dict[str, str]) -> None:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is not None:
        subprocess.run([control], input=b"quit\n", env={**os.environ, **places}, check=False)
