"""Writes csrc/flash_attn/src/instantiations/*.cu, one file per shipped kernel.

python tools/generate_instantiations.py           write what is missing or differs
python tools/generate_instantiations.py --check   change nothing, exit 1 if anything differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashcute import shipped  # noqa: E402
from flashcute.jit import source_text  # noqa: E402

FOLDER = ROOT / "csrc" / "flash_attn" / "src" / "instantiations"


def wanted_files() -> dict[str, str]:
    """Returns the text of each file by its name, for every shipped configuration."""
    return {f"{stem}.cu": source_text(c) for stem, c in shipped.instantiations().items()}


def differences(folder: Path) -> list[str]:
    """Lists each file of ``folder`` that is missing, differs or should not be there."""
    wanted = wanted_files()
    present = {path.name: path.read_text() for path in folder.glob("*")}
    missing = [f"{name}: missing" for name in wanted.keys() - present.keys()]
    extra = [f"{name}: not a shipped kernel" for name in present.keys() - wanted.keys()]
    both = wanted.keys() & present.keys()
    differs = [f"{n}: differs from the generated text" for n in both if wanted[n] != present[n]]
    return sorted(missing + extra + differs)


def write(folder: Path) -> None:
    """Makes ``folder`` hold exactly the wanted files; unchanged files keep their time stamps."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = wanted_files()
    for path in folder.glob("*"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    if not parser.parse_args().check:
        write(FOLDER)
        return 0
    found = differences(FOLDER)
    for line in found:
        print(f"{FOLDER.relative_to(ROOT)}/{line}")
    if found:
        print("run: python tools/generate_instantiations.py")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
