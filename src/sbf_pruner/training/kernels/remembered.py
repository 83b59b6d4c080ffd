"""What was found to be quickest on a device, kept for the processes after this one.

A question enters, as words; the answer that an earlier process gave leaves, if there was one.  It lies beside what
the compiler keeps, one small file each, so that runs which start together do not disturb one another's timing.
Losing all of it costs the seconds it takes to measure again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from ...errors import RunError
from ...files import replacing


def recall(question: str) -> str | None:
    """The answer that was kept, if any."""
    with suppress(OSError, UnicodeDecodeError):
        asked, _, answer = _place(question).read_text("utf-8").partition("\n")
        if asked == question:
            return answer.strip()
    return None


def keep(question: str, answer: str) -> None:
    """Keep an answer; a folder that cannot be written to keeps none."""
    with suppress(OSError, RunError), replacing(_place(question)) as path:
        path.write_text(f"{question}\n{answer}\n", "utf-8")


def _place(question: str) -> Path:
    return Path(cache_dir()) / "sbf_pruner" / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.txt"
