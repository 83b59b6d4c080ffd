"""Put one-token faults into the package, one at a time, and record which of them the tests find.

    python tools/faults.py choose tools/faults.json             # 100 faults by a fixed seed
    python tools/faults.py cover coverage.json                  # which test runs which line (a whole test run)
    python tools/faults.py try tools/faults.json coverage.json  # adds "found"; goes on where it stopped
    python tools/faults.py locate tools/faults.json             # find moved faults by function and source line

A fault is found if a test that runs the changed line fails, or does not end within `--timeout` seconds. Work is
done in copies of the source tree, so the tree itself stays as it is. `cover` and `try` need the package pytest-cov.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/sbf_pruner")
# Where faults are put, and how many of a hundred: what decides the filters, the cut and the training.
PARTS = {
    "graph": (("graph",), 35),
    "surgery": (("surgery", "modules.py"), 15),
    "scores": (("scores", "pruner.py"), 20),
    "budget": (("budget",), 15),
    "training": (("training",), 15),
}
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "&": "|", "|": "&",
    "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "True": "False", "False": "True", "0": "1", "1": "0", "2": "3", "-1": "0",
    "min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "sorted": "list",
}  # fmt: skip
OPERATORS: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
    ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|", ast.And: "and", ast.Or: "or",
}  # fmt: skip


def candidates(path: Path) -> list[dict[str, Any]]:
    """Every place of a file where a token can be swapped: inside functions, outside of errors and annotations."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    found: list[dict[str, Any]] = []

    def add(function: str, line: int, start: int, end: int, old: str) -> None:
        text = lines[line - 1]
        start, end = (len(text.encode()[:offset].decode()) for offset in (start, end))
        at = text.find(old, start, end if end > start else None)
        if at >= 0 and old in SWAPS:
            same = [n for n in range(len(lines)) if lines[n].strip() == text.strip()]
            found.append(
                {
                    "file": path.relative_to(ROOT / PACKAGE).as_posix(),
                    "function": function,
                    "line": text.strip(),
                    "which": same.index(line - 1),
                    "column": at - (len(text) - len(text.lstrip())),
                    "old": old,
                    "new": SWAPS[old],
                }
            )

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{node.name}".lstrip(".")
            for child in node.body:
                visit(child, name)
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, function)
            return
        inside = function.rpartition(".")[2].lstrip("_")[:1].islower()
        if inside:
            if isinstance(node, ast.Compare):
                before: ast.expr = node.left
                for operator, after in zip(node.ops, node.comparators, strict=True):
                    if before.end_lineno == after.lineno:
                        name = OPERATORS.get(type(operator), "")
                        add(function, after.lineno, before.end_col_offset or 0, after.col_offset, name)
                    before = after
            elif isinstance(node, ast.BinOp) and node.left.end_lineno == node.right.lineno:
                name = OPERATORS.get(type(node.op), "")
                add(function, node.right.lineno, node.left.end_col_offset or 0, node.right.col_offset, name)
            elif isinstance(node, ast.BoolOp):
                for one, other in zip(node.values, node.values[1:], strict=False):
                    if one.end_lineno == other.lineno:
                        name = OPERATORS[type(node.op)]
                        add(function, other.lineno, one.end_col_offset or 0, other.col_offset, name)
            elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
                add(function, node.lineno, node.col_offset, node.end_col_offset or 0, repr(node.value))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                add(function, node.lineno, node.col_offset, node.end_col_offset or 0, node.id)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def files_of(part: str) -> list[Path]:
    base = ROOT / PACKAGE
    found: list[Path] = []
    for name in PARTS[part][0]:
        place = base / name
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []
    return found


def choose(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw faults by the shares of `PARTS`, at most two in one function."""
    rng = random.Random(seed)
    chosen: list[dict[str, Any]] = []
    for part, (_, share) in PARTS.items():
        pool = [{"part": part, **place} for path in files_of(part) for place in candidates(path)]
        rng.shuffle(pool)
        taken: dict[tuple[str, str], int] = defaultdict(int)
        wanted = round(share * count / 100)
        for place in pool:
            key = place["file"], place["function"]
            if wanted and taken[key] < 2:
                taken[key] += 1
                wanted -= 1
                chosen.append(place)
    return [{"id": number, **fault} for number, fault in enumerate(chosen)]


def line_number(fault: dict[str, Any], root: Path = ROOT) -> int | None:
    """The line of a fault's file that it changes, counted from 1; None if it is not there."""
    path = root / PACKAGE / fault["file"]
    if not path.is_file():
        return None
    lines = path.read_text("utf-8").splitlines()
    same = [n for n, text in enumerate(lines, 1) if text.strip() == fault["line"]]
    return same[min(fault["which"], len(same) - 1)] if same else None


def apply(fault: dict[str, Any], root: Path) -> str:
    """Put the fault into the tree at `root`; return the file's text from before."""
    path = root / PACKAGE / fault["file"]
    text = path.read_text("utf-8")
    number = line_number(fault, root)
    if number is None:
        raise SystemExit(f"fault {fault['id']}: {fault['file']} has no line {fault['line']!r}; run locate")
    lines = text.splitlines(keepends=True)
    line = lines[number - 1]
    at = len(line) - len(line.lstrip()) + fault["column"]
    if line[at : at + len(fault["old"])] != fault["old"]:
        raise SystemExit(
            f"fault {fault['id']}: {fault['old']!r} is not at column {fault['column']} of {fault['line']!r}"
        )
    lines[number - 1] = line[:at] + fault["new"] + line[at + len(fault["old"]) :]
    path.write_text("".join(lines), "utf-8")
    return text


def copy_tree(target: Path) -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def cover(path: Path, jobs: int) -> None:
    """Run the default tests once and write which test runs which lines, and how long each test takes."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        copy_tree(tree)
        (tree / ".coveragerc").write_text(f"[run]\nsource = {PACKAGE}\n[report]\ninclude = {PACKAGE}/*\n")
        words = [
            "-n",
            str(jobs),
            "--dist",
            "loadfile",
            "--cov",
            str(PACKAGE),
            "--cov-context=test",
            "--cov-report=",
        ]
        subprocess.run(
            [sys.executable, "-m", "pytest", *words, "--junitxml=tests.xml", "-o", "junit_duration_report=total"],
            cwd=tree, env=environment(tree), check=False,
        )  # fmt: skip
        import xml.etree.ElementTree as xml

        from coverage import CoverageData

        data = CoverageData(str(tree / ".coverage"))
        data.read()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            short = Path(file).relative_to(tree / PACKAGE).as_posix()
            lines[short] = {
                line: sorted({context.partition("|")[0] for context in contexts if "::" in context})
                for line, contexts in data.contexts_by_lineno(file).items()
            }
        seconds = {}
        for case in xml.parse(tree / "tests.xml").iter("testcase"):
            broken = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            if not broken:
                key = case.get("classname", "").replace(".", "/") + ".py::" + case.get("name", "")
                seconds[key] = float(case.get("time", 0))
        path.write_text(json.dumps({"lines": lines, "seconds": seconds}), "utf-8")


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def attempt(fault: dict[str, Any], tree: Path, covered: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run the tests that run the fault's line, the quickest first, until one fails."""
    number = line_number(fault)
    seconds = covered["seconds"]
    tests = covered["lines"].get(fault["file"], {}).get(str(number), [])
    tests = sorted((test for test in tests if test in seconds), key=lambda test: seconds[test])
    if not tests:
        return {"found": False, "tests": 0}
    before = apply(fault, tree)
    listing = tree / "chosen-tests.txt"
    listing.write_text("\n".join(tests), "utf-8")
    started = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"@{listing}"],
            cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        code, said = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired:
        code, said = 1, "FAILED timeout"
    finally:
        (tree / PACKAGE / fault["file"]).write_text(before, "utf-8")
    by = next((line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
    found = {"found": code == 1 or code == 2, "tests": len(tests), "seconds": round(time.monotonic() - started)}
    return {**found, **({"by": by} if by else {})}


def try_all(path: Path, coverage: Path, jobs: int, timeout: float) -> None:
    faults = json.loads(path.read_text("utf-8"))
    covered = json.loads(coverage.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        trees: Queue[Path] = Queue()
        for number in range(jobs):
            copy_tree(Path(name) / str(number))
            trees.put(Path(name) / str(number))

        def work(fault: dict[str, Any]) -> None:
            tree = trees.get()
            try:
                fault |= attempt(fault, tree, covered, timeout)
            finally:
                trees.put(tree)
            path.write_text(json.dumps(faults, indent=1) + "\n", "utf-8")
            print(fault["id"], fault["file"], fault["found"], fault.get("by", ""), flush=True)

        list(pool.map(work, [fault for fault in faults if "found" not in fault]))
    found = sum(fault["found"] for fault in faults)
    print(f"{found} of {len(faults)} faults are found")


def locate(path: Path) -> None:
    """Find faults whose file was moved or merged by their function's name and line, and forget what was found."""
    faults = json.loads(path.read_text("utf-8"))
    everywhere = [place for part in PARTS for file in files_of(part) for place in candidates(file)]
    for fault in faults:
        if line_number(fault) is not None:
            continue
        keys = ("line", "column", "old", "new")
        same = [place for place in everywhere if all(place[key] == fault[key] for key in keys)]
        named = [place for place in same if place["function"] == fault["function"]] or same
        if named:
            fault |= named[0]
        else:
            print(f"fault {fault['id']}: {fault['file']} {fault['function']}: {fault['line']}")
    path.write_text(json.dumps(faults, indent=1) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("choose", "cover", "try", "locate"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        if name == "choose":
            command.add_argument("--count", type=int, default=100)
            command.add_argument("--seed", type=int, default=0)
        if name == "try":
            command.add_argument("coverage", type=Path)
            command.add_argument("--timeout", type=float, default=600)
        if name in ("cover", "try"):
            command.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.command == "choose":
        given.file.write_text(json.dumps(choose(given.count, given.seed), indent=1) + "\n", "utf-8")
    elif given.command == "cover":
        cover(given.file.resolve(), given.jobs)
    elif given.command == "try":
        try_all(given.file.resolve(), given.coverage.resolve(), given.jobs, given.timeout)
    else:
        locate(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
