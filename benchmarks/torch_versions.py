"""Run the tests on the installed version of torch and save how many passed.

`make test-torch TORCH=2.15.0` makes an environment with that torch and runs this script in it.  The table in the
documents is written again, because the tests compare it with the saved results.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tables
from torch.torch_version import TorchVersion

from saving import held_runs, save_result
from sbf_pruner.utils import version_of

ROOT = Path(__file__).resolve().parent.parent


def counts(report: Path) -> dict[str, int]:
    """Outcomes and seconds of a run of pytest, from its JUnit report."""
    suite = ET.parse(report).getroot()[0]
    total, broken, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    failed = broken + errors
    seconds = round(float(suite.get("time", 0)))
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped, "seconds": seconds}


def main() -> int:
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-n", "auto", "--dist", "loadfile", f"--junitxml={report}"]
        done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False)
        if not report.is_file():
            return done.returncode or 1
        row: dict[str, Any] = {
            "torch": version_of("torch"),
            "torchvision": version_of("torchvision"),
            "python": platform.python_version(),
            **counts(report),
            "date": date.today().isoformat(),
        }
    others = [run for run in held_runs("torch_versions") if run["torch"] != row["torch"]]
    runs = sorted([*others, row], key=lambda run: TorchVersion(run["torch"]))
    save_result("torch_versions", {"runs": runs})
    tables.main(check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
