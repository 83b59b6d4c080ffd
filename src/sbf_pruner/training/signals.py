"""SIGINT and SIGTERM while a run trains: stop at the end of a step, with a checkpoint.

Terminals send SIGINT, schedulers SIGTERM and some 30 seconds later SIGKILL.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Stopped

_USUAL: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Signals:
    """While entered, the first signal is noted inside `deferred()` and raises `Stopped` elsewhere.

    A second signal ends the process at once, because the first one puts the usual handlers back.  Handlers other
    than the usual ones (a user's own, an ignored SIGINT) stay, and only in the main thread are any replaced.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._replaced: list[signal.Signals] = []

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._replaced = [number for number, usual in _USUAL.items() if signal.getsignal(number) is usual]
            for number in self._replaced:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While entered, a signal is only noted in `received`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: Any) -> None:
        self._put_back()
        self.received = number
        if not self._deferred:
            raise Stopped(number)

    def _put_back(self) -> None:
        for number in self._replaced:
            signal.signal(number, _USUAL[number])
        self._replaced = []
