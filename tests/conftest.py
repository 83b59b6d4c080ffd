"""What all tests share; its place also lets them import `zoo`."""

import os
import signal

import pytest
import torch
from hypothesis import settings

# The same cases every time where nobody looks for new ones; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("repeat", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# A shell that starts tests in the background makes them ignore SIGINT, and the package keeps an ignored signal so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny networks: a second thread costs more than it gives.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def untuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a test is about what a step computes; trying every kernel for it takes minutes."""
    if request.node.get_closest_marker("gpu"):
        from sbf_pruner.training.engine import captured

        monkeypatch.setitem(captured.OPTIONS, "max_autotune", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for the tests of a GPU on a machine without one is told so."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
