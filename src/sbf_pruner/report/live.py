"""Watch a run while it trains: its report as a live page on this machine, and TensorBoard event files.

The server listens on 127.0.0.1 and answers only GET and HEAD. On a request, it reads the run folder if a file has
changed; it never writes. Requests whose Host header names another host are refused, to prevent DNS rebinding, with
which a foreign web page could reach the server through its own domain name.

TensorBoard events go to RUN/tensorboard. A resumed run continues after its last epoch; events of epochs that run
again replace the old ones.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from ..errors import PruningError, RunError
from ..schedule import SCORE_KINDS
from .html import NOTHING, Markup, concat, element
from .page import HEADLINE, SECTIONS, live_policy, page, page_title, run_parts
from .run_data import read_run

PORT = 8321
_NEWS = "/parts.json"
_FILES = ("recipe.toml", "network.json", "metrics.jsonl", "scores.jsonl", "latency.json", "summary.json")
_PATIENCE = 4.0  # seconds at most to wait until an open page has fetched the final state
_ALONE = "this server answers only requests to an address of this machine\n"


@contextmanager
def live_view(folder: Path, port: int = PORT, *, fresh: bool = True) -> Iterator[str]:
    """Serve a run's report while the context is open; yields its address.

    If `fresh` is true, files that an earlier run left are not shown. A context that ends without an error waits a
    few seconds for an open page to fetch the final state. Raises PruningError if the port cannot be used.
    """
    view = _View(folder, time.time() if fresh else 0.0)
    try:
        server = _Server(("127.0.0.1", port), _Handler)
    except OverflowError:
        raise PruningError(f"--live {port}: a port is a number from 1 to 65535") from None
    except OSError as error:
        raise PruningError(
            f"--live {port}: port {port} cannot be used ({error.strerror or error}); name another one"
        ) from error
    server.view = view
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
        view.wait_until_seen(_PATIENCE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _View:
    """The report of a run folder, redrawn on a request if a file has changed; thread-safe."""

    def __init__(self, folder: Path, since: float) -> None:
        self.folder, self.since = folder, since
        self.lock = threading.Lock()
        self.stamp: Any = None
        self.drawn: dict[str, Markup] = {}
        self.title, self.finished = "", False
        self.history: dict[str, dict[str, int]] = {}  # hashes of the parts, by version
        self.requested, self.shown = 0.0, False  # time of the last request; whether the final state was fetched

    def page(self) -> str:
        """Return the current page."""
        with self.lock:
            self._refresh()
            parts = dict.fromkeys((HEADLINE, *SECTIONS), NOTHING) | self.drawn
            return page(self.title, "", parts, live=_NEWS, version=self._version())

    def changed_parts(self, seen: str) -> dict[str, Any]:
        """Return the parts that have changed since the version `seen`, which the page shows."""
        with self.lock:
            self._refresh()
            self.shown = self.finished
            before = self.history.get(seen, {})
            parts = {key: part for key, part in self.drawn.items() if before.get(key) != hash(part)}
            return {"version": self._version(), "title": self.title, "finished": self.finished, "parts": parts}

    def _version(self) -> str:
        """Return an identifier of the current parts, and remember their hashes under it for `changed_parts`."""
        self.requested = time.monotonic()
        hashes = {key: hash(part) for key, part in self.drawn.items()}
        version = f"{hash(frozenset(hashes.items())) & 0xFFFFFFFFFFFF:x}"
        self.history[version] = hashes
        return version

    def wait_until_seen(self, seconds: float) -> None:
        """Wait until an open page has fetched the final state, at most `seconds`."""
        if not (self.folder / "summary.json").is_file():
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end and time.monotonic() - self.requested < 5 and not self.shown:
            time.sleep(0.05)
        if self.shown:
            time.sleep(0.1)  # let the response finish

    def _refresh(self) -> None:
        stamp = [_stamp(self.folder / name) for name in _FILES]
        if stamp == self.stamp:
            return
        try:
            if stamp[0] is None or stamp[0][0] < self.since - 1:
                raise RunError("The run is about to begin.")
            run = read_run(self.folder)
            self.drawn, self.title, self.finished = run_parts(run), page_title(run), run.finished
            self.stamp = stamp
        except Exception as error:  # a file may be incomplete or edited by hand; the next request reads it again
            why = str(error) if isinstance(error, PruningError) else f"{type(error).__name__}: {error}"
            facts = element("p", element("span", "not finished", class_="state not"), class_="facts")
            lead = element("p", why, class_="lead")
            self.drawn = {HEADLINE: concat(facts, element("h1", self.folder.name), lead)}
            self.title, self.finished = self.folder.name, False


def _stamp(path: Path) -> tuple[float, int] | None:
    try:
        found = path.stat()
        return found.st_mtime, found.st_size
    except OSError:
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    view: _View

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a request, such as a page that was closed before its response arrived."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "sbf"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        port = self.server.server_port
        hosts = {f"127.0.0.1:{port}", f"localhost:{port}"} | ({"127.0.0.1", "localhost"} if port == 80 else set())
        if self.headers.get("Host", "").lower() not in hosts:
            return self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", _ALONE)
        address, view = urlsplit(self.path), self.server.view
        if address.path == "/":
            return self._answer(HTTPStatus.OK, "text/html", view.page())
        if address.path == _NEWS:
            parts = view.changed_parts(parse_qs(address.query).get("seen", [""])[0])
            return self._answer(HTTPStatus.OK, "application/json", json.dumps(parts))
        return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only the page /\n")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "this page can only be read\n")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{live_policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do not log requests, because the lines would interleave with the output of the run."""


FOLDER = "tensorboard"
_SCALARS = {
    "loss": "loss",
    "penalty": "penalty",
    "train_accuracy": "accuracy/training",
    "validation_accuracy": "accuracy/validation",
    "test_accuracy": "accuracy/test",
    "lr": "learning rate",
    "filters": "size/filters",
    "params": "size/parameters",
    "macs": "size/MACs",
}


@contextmanager
def tensorboard_log(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes the scalars of an epoch's record, and histograms of the scores of its layers.

    Raises a PruningError with the remedy if TensorBoard is not installed.
    """
    try:
        make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise PruningError('--tensorboard needs tensorboard; pip install "sbf-pruner[tensorboard]"') from None
    log: Any = None

    def write(record: dict[str, Any]) -> None:
        nonlocal log
        if log is None:  # created at the first record, because a run needs an empty folder to start
            log = make(folder / FOLDER, purge_step=record["done"])
        control = "control/" if record["phase"] == "control" else ""
        for key, name in _SCALARS.items():
            if record.get(key) is not None:
                log.add_scalar(control + name, record[key], record["done"])
        if record["phase"] in SCORE_KINDS:
            lines = (folder / "scores.jsonl").read_text("utf-8").splitlines()
            last = json.loads(lines[-1]) if lines else {}
            if last.get("done") == record["done"]:
                for name, scores in last["scores"].items():
                    log.add_histogram(f"scores/{name}", np.asarray(scores), record["done"])

    try:
        yield write
    finally:
        if log is not None:
            log.close()
