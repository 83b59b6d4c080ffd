"""The live view's server: whom it answers, what it sends, how it ends; and the records for TensorBoard."""

from __future__ import annotations

import html
import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import small_run
from sbf_pruner.errors import PruningError
from sbf_pruner.report import live_view, tensorboard_log


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    small_run(path)
    return path


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """The run as it was after its first epochs."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    (path / "summary.json").unlink()
    for name, count in (("metrics.jsonl", 4), ("scores.jsonl", 2)):
        lines = (path / name).read_text().splitlines(keepends=True)
        (path / name).write_text("".join(lines[:count]))
    return path


@pytest.fixture
def served(folder: Path, port: int) -> Iterator[int]:
    with live_view(folder, port, fresh=False) as address:
        assert address == f"http://127.0.0.1:{port}/"
        yield port


def ask(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host} if host is not None else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def news(port: int, seen: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(port, f"/parts.json?seen={seen}")[2])
    return found


def test_the_page_is_served_and_only_to_be_read(served: int) -> None:
    status, headers, page = ask(served)
    assert status == 200 and "Epoch 4 of 20 has ended" in page and 'data-live="/parts.json"' in page
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', page)
    assert headers["Content-Security-Policy"] == f"{html.unescape(policy)}; frame-ancestors 'none'"
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    status, headers, body = ask(served, method="HEAD")
    assert status == 200 and body == "" and int(headers["Content-Length"]) > 10_000
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = ask(served, method=method)
        assert status == 405 and headers["Allow"] == "GET, HEAD"
    for path in ("/metrics.jsonl", "/../recipe.toml", "/%2e%2e/recipe.toml", "//etc/passwd"):
        assert ask(served, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_is_refused(served: int, host: str) -> None:
    for path in ("/", "/parts.json"):
        status, _, text = ask(served, path, host=host)
        assert status == 421 and "small" not in text


def test_this_machine_by_its_names(served: int) -> None:
    for host in (f"localhost:{served}", f"127.0.0.1:{served}", f"LOCALHOST:{served}"):
        assert ask(served, host=host)[0] == 200
    assert ask(served, host=f"localhost:{served + 1}")[0] == 421


def test_it_listens_on_this_machine_alone(served: int) -> None:
    with socket.socket() as probe, pytest.raises(OSError):
        probe.settimeout(2)
        probe.connect(("127.0.0.2", served))


def test_only_what_has_changed_is_sent(served: int, folder: Path, finished: Path) -> None:
    first = news(served)
    assert set(first["parts"]) >= {"headline", "course", "kept", "recipe"} and not first["finished"]
    again = news(served, first["version"])
    assert again["parts"] == {} and again["version"] == first["version"]
    line = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)[4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line)
    later = news(served, first["version"])
    assert set(later["parts"]) == {"headline", "course"} and "Epoch 5 of 20" in later["parts"]["headline"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"half a rec')
    assert news(served, later["version"])["parts"] == {}
    assert set(news(served, "unknown")["parts"]) == set(first["parts"])


def test_the_end_is_told(served: int, folder: Path, finished: Path) -> None:
    shutil.copy(finished / "summary.json", folder)
    last = news(served)
    assert last["finished"] and "finished" in last["parts"]["headline"]


def test_a_damaged_file_is_a_sentence_and_the_server_goes_on(served: int, folder: Path) -> None:
    good = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{}}\n")
    assert "line 1 is damaged" in news(served)["parts"]["headline"]
    (folder / "metrics.jsonl").write_text(good)
    assert "Epoch 4 of 20" in news(served)["parts"]["headline"]


def test_a_run_that_starts_over_does_not_show_the_one_before(folder: Path, port: int) -> None:
    time.sleep(1.1)
    with live_view(folder, port, fresh=True):
        assert "The run is about to begin" in ask(port)[2]
        (folder / "metrics.jsonl").unlink()
        (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text())
        assert "nothing has been trained yet" in news(port)["parts"]["headline"]


def test_before_there_is_a_folder(tmp_path: Path, port: int) -> None:
    with live_view(tmp_path / "later", port):
        status, _, page = ask(port)
        assert status == 200 and "The run is about to begin" in page
    assert not (tmp_path / "later").exists()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


@pytest.mark.parametrize("watched", [True, False])
def test_it_waits_a_moment_for_a_page_that_is_open(watched: bool, finished: Path, port: int) -> None:
    with live_view(finished, port, fresh=False):
        if watched:
            ask(port)
        began = time.monotonic()
        asking = threading.Timer(0.5, lambda: news(port))
        asking.start()
    took = time.monotonic() - began
    asking.cancel()
    assert 0.4 < took < 3.5 if watched else took < 2


@pytest.mark.parametrize("taken", [True, False])
def test_a_port_that_cannot_be_used(taken: bool, port: int, tmp_path: Path) -> None:
    with socket.socket() as other:
        if taken:
            other.bind(("127.0.0.1", port))
            other.listen()
        number = port if taken else 70000
        match = "cannot be used .*; name another one$" if taken else "a port is a number from 1 to 65535$"
        with pytest.raises(PruningError, match=match), live_view(tmp_path, number):
            pass


# -- TensorBoard ---------------------------------------------------------------------------------------------


def logged(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0})
    return found.Reload()


def test_records_go_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with tensorboard_log(tmp_path / "run") as write:
        result = small_run(tmp_path / "run", report=write)
    found = logged(tmp_path / "run")
    assert {"loss", "accuracy/test", "learning rate", "size/MACs", "control/loss"} <= set(found.Tags()["scalars"])
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    macs = [(event.step, event.value) for event in found.Scalars("size/MACs")]
    assert macs == [(r["done"], r["macs"]) for r in records if r["phase"] != "control"]
    histograms = found.Histograms("scores/stem")
    assert [event.step for event in histograms] == [3, 4, 6, 7]
    assert histograms[0].histogram_value.num == result.summary["layers"]["stem"]["before"]
    with tensorboard_log(tmp_path / "run") as write:
        write(records[5])
    assert [event.step for event in logged(tmp_path / "run").Scalars("loss")] == [1, 2, 3, 4, 5, 6], "resumed"
    with tensorboard_log(tmp_path / "run") as write:
        small_run(tmp_path / "run", report=write, force=True, phases={"warmup": 1, "cycles": 0, "finetune": 0})
    assert len(logged(tmp_path / "run").Scalars("loss")) == 1, "a run that starts over leaves nothing behind"


def test_without_tensorboard_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("sbf_pruner.report.live.importlib.import_module", absent)
    said = r'^--tensorboard needs tensorboard; pip install "sbf-pruner\[tensorboard\]"$'
    with pytest.raises(PruningError, match=said), tensorboard_log(tmp_path):
        pass
