"""The ladder's Numba rung, in Numba's CUDA simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_right_in_the_simulator():
    pytest.importorskip("numba", reason="numba is not installed")
    # Numba decides between simulator and driver when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "examples.ladder.numba_rung"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 4 and "WRONG" not in done.stdout
