"""What the varlen functions refuse: the table of bad_input_varlen.py on every device."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from bad_input_varlen import CASES, CU_K, CU_Q, KV, QKV, VARLEN, Case, arguments

import flashcute
from flashcute import checks_varlen

RUNS = [(device, case) for case in CASES for device in case.on if device != "cuda"]


@pytest.mark.parametrize(
    ("device", "case"), RUNS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_odd_input_is_refused(device: str, case: Case) -> None:
    failure = case.failure(device)
    assert failure is None, failure


def test_odd_inputs_are_many_and_their_names_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 100


@pytest.mark.parametrize("function", [VARLEN, KV, QKV])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_unchanged_call_is_right(function: str, device: str) -> None:
    given = arguments(function, device)
    out = getattr(flashcute, function)(**given)
    assert (out.shape, out.dtype, out.device.type) == ((8, 4, 16), torch.float16, device)


# A compilation takes half a second, so only a few cases are tried. Cases of max_seqlen are left
# out, as a compiled function checks it when it runs.
COMPILED = [
    case
    for case in CASES
    if "meta" in case.on and not any(name.startswith("max_seqlen") for name in case.change)
][::12]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_odd_input_to_a_compiled_function(case: Case) -> None:
    torch._dynamo.reset()
    failure = case.failure("meta", lambda function: torch.compile(function, backend="eager"))
    assert failure is None, failure


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"cu_seqlens_k": torch.tensor([0, 5, 4, 7])}, r"cu_seqlens_k to be non-decreasing, got"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 4, 99])}, r"cu_seqlens_q\[-1\] <= 8, .*=99"),
        ({"max_seqlen_q": 3}, r"max_seqlen_q >= 4, .*got max_seqlen_q=3"),
        ({"max_seqlen_k": -1}, r"max_seqlen_k >= 5, .*got max_seqlen_k=-1"),
    ],
)
def test_values_are_checked_when_a_compiled_function_runs(change: dict, pattern: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flashcute.flash_attn_varlen_func, backend="eager", fullgraph=True)
    compiled(**arguments(VARLEN, "cpu"))
    with pytest.raises(ValueError, match=rf"^flashcute::attend_varlen_cpu: expected .*{pattern}"):
        compiled(**arguments(VARLEN, "cpu") | change)


def test_odd_input_under_python_O() -> None:
    # -O strips assert statements, so validation that used them would vanish.
    script = (
        "import bad_input_varlen as b\n"
        "runs = [(c, d) for c in b.CASES for d in c.on if d == 'cpu']\n"
        "failures = [f for c, d in runs if (f := c.failure(d))]\n"
        "print(*failures, sep='\\n')\n"
        "print(__debug__, len(failures))\n"
    )
    run = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", script],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(flashcute.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "False 0", run.stdout


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_read_lengths(dtype: torch.dtype) -> None:
    cu_q, cu_k = torch.tensor(CU_Q, dtype=dtype), torch.tensor(CU_K, dtype=dtype)
    names = checks_varlen.Names("f")
    found = checks_varlen.read_lengths(names, (8, 8), (cu_q, cu_k), (None, None), (4, 5))
    assert found == ([0, 4, 4], [4, 0, 3], [0, 5, 7], [5, 2, 0])
    used = torch.tensor([4, 1, 0], dtype=torch.int32)
    found = checks_varlen.read_lengths(names, (8, 8), (cu_q, cu_k), (None, used), (4, 4))
    assert found.used_k == [4, 1, 0]  # max_seqlen_k bounds the lengths in use
