"""How the tool handles compute-sanitizer's answers; compute-sanitizer itself needs a GPU."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import sanitize
import torch

from flashcute import heuristics, ops
from flashcute.config import HEAD_DIMS
from flashcute.heuristics import FwdProblem, bwd_with_options, sm90_bwd_config
from flashcute.jit import abi

STAND_IN = """#!{python}
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
planted = "--planted" in sys.argv
if planted and {finds}:
    print("========= {found} of size 4 bytes")
if not planted and {launches}:
    print("19 {done}")
sys.exit(3 if planted or tool == {bad!r} else 0)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*, finds=True, launches=True, bad=None, arguments=()):
        place = tmp_path / "compute-sanitizer"
        words = {"finds": finds, "launches": launches, "bad": bad}
        words |= {"python": sys.executable, "found": sanitize.FOUND, "done": sanitize.DONE}
        place.write_text(STAND_IN.format(**words))
        place.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        # main() sets this variable; monkeypatch restores it.
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        monkeypatch.setattr(sanitize, "build_missing", lambda: None)  # there is no GPU to build for
        return sanitize.main(["--out", str(tmp_path / "out"), *arguments])

    return run


def test_all_well(run, capsys, tmp_path):
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["memcheck, planted fault: found", "memcheck: no error", "synccheck: no error"]
    assert [line.rpartition(", ")[0] for line in lines] == names
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {
        "memcheck_planted",
        "memcheck",
        "synccheck",
    }


@pytest.mark.parametrize("wrong", [{"bad": "synccheck"}, {"finds": False}, {"launches": False}])
def test_what_is_wrong_shows(run, capsys, wrong):
    assert run(**wrong) == 1
    assert "NOT AS IT SHOULD BE" in capsys.readouterr().out


def test_tools_can_be_selected(run, capsys):
    assert run(arguments=("--tools", "racecheck"), bad="memcheck") == 0
    assert "racecheck: no error" in capsys.readouterr().out


def test_without_the_tool_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize, "SYSTEM", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="expected the CUDA toolkit's compute-sanitizer"):
        sanitize.main([])


def test_planted_fault_has_no_memory(monkeypatch):
    """The kernel gets the strides of a whole log-sum-exp, but memory for only one value of it."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    b, h, seqlen_q, d = 2, 3, 5, 32
    lse = sanitize.planted_lse(b, h, seqlen_q)
    assert lse.shape == (b, h, seqlen_q) and lse.is_contiguous()
    assert lse.untyped_storage().nbytes() == lse.element_size()
    q = torch.empty(b, seqlen_q, h, d, dtype=torch.bfloat16)
    params = abi.fwd_params({**dict.fromkeys("qkvo", q), "softmax_lse": lse}, d**-0.5)
    assert params.softmax_lse_ptr == lse.untyped_storage().data_ptr() != 0
    strides = params.softmax_lse_batch_stride, params.softmax_lse_head_stride
    assert strides == (h * seqlen_q, seqlen_q)


def test_backwards_that_are_not_chosen_are_launched_too():
    of_hopper = {config for config in sanitize.configs((9, 0))[1] if config.arch == 90}
    asked = {*itertools.product(HEAD_DIMS, ("none", "causal"), (False, True))}
    assert {(config.head_dim, config.mask, config.varlen) for config in of_hopper} == asked
    for capability in ((8, 0), (9, 0)):
        forward, backward = sanitize.configs(capability)
        assert len(backward) == len(set(backward)) and {c.dtype for c in forward} == {"bf16"}
        scored = [c for c in backward if c.softcap or c.alibi or c.dropout]
        assert all(c.softcap and c.alibi and c.dropout for c in scored)
        found = {(c.arch, c.head_dim, c.mask, c.varlen) for c in scored}
        arch = heuristics.kernel_class(capability)
        assert found == {*itertools.product((arch,), HEAD_DIMS, ("causal",), (False, True))}
        for fused in (False, True):
            plain = [c for c in backward if c not in scored]
            of_sm80 = [c for c in plain if c.arch == 80 and c.fused == fused]
            found = {(c.head_dim, c.mask, c.varlen) for c in of_sm80}
            assert found == asked and len(of_sm80) == len(found)
    assert {config.arch for config in backward} == {80, 90}
    assert {config.arch for config in sanitize.configs((8, 0))[1]} == {80}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_what_a_launch_of_a_backward_asks_for(scored, varlen, deterministic, monkeypatch):
    """The CPU's operator computes the gradients here; they are checked like those of a kernel."""
    config = sm90_bwd_config("bf16", 192, "causal")
    config = bwd_with_options(config, scored, scored, scored, varlen)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    ops.load()
    asked, name = [], "bwd_varlen" if varlen else "bwd"
    operator = getattr(torch.ops.flashcute, name).default

    def run(*args):
        problem = FwdProblem("bf16", True, 1, 65, 65, 4, 2, 192, varlen=varlen)
        *_, wanted, state, dropout_p, softcap, slopes = args
        given = (state is not None, dropout_p > 0, softcap > 0, slopes is not None)
        assert given == (scored,) * 4
        asked.append((heuristics.choose_bwd(problem, (9, 0)), wanted))
        return operator(*args)

    monkeypatch.setattr(torch.ops.flashcute, name, SimpleNamespace(default=run))
    choose = heuristics.choose_bwd
    sanitize.launch_backward(config, deterministic)
    assert asked == [(config, 31 if deterministic else 15)] and heuristics.choose_bwd is choose
