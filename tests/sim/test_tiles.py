"""The picture of visited tiles agrees with the mask, and shows where a kernel deviates from it."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch

from flashcute import __main__ as cli
from flashcute import heuristics, sim
from flashcute.sim import tiles


def traced(causal, seqlen_q=300, seqlen_k=200):
    config = heuristics.fwd_config("fp16", 64, causal, (8, 0))
    q = torch.randn(2, seqlen_q, 4, 64).half()
    k = torch.randn(2, seqlen_k, 2, 64).half()
    return sim.run_fwd(q, k, k, config, trace=True), q, k, config


def test_causal_tiles():
    result, q, k, config = traced(True)
    for batch in (0, 1):
        found = tiles.tile_map(result.trace, q, k, config, batch=batch, head=3)
        assert len(found.states) == -(-300 // config.tile_m)
        assert found.count("missed") == found.count("wasted") == 0
        assert found.count("masked") > 0 and found.count("full") > 0 and found.count("skipped") > 0


def test_all_tiles_without_mask():
    result, q, k, config = traced(False)
    found = tiles.tile_map(result.trace, q, k, config)
    assert found.count("skipped") == found.count("missed") == found.count("wasted") == 0
    assert found.count("masked") == len(found.states)  # the last key tile is ragged


def test_faults_are_shown():
    result, q, k, config = traced(True)
    nothing_of_k = result.trace[result.trace[:, 1] == 0]
    assert tiles.tile_map(nothing_of_k, q, k, config).count("missed") > 0
    unmasked, q, k, config = traced(False)
    causal = heuristics.fwd_config("fp16", 64, True, (8, 0))
    assert tiles.tile_map(unmasked.trace, q, k, causal).count("wasted") > 0


def test_command_line(tmp_path, capsys):
    picture = tmp_path / "tiles.svg"
    assert cli.main(["sim", "--causal", "--seqlen-q", "150", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "verdict       pass" in printed
    assert "ldmatrix_conflicts" in printed
    assert "max error" in printed
    rectangles = ET.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert sum(1 for _ in rectangles) > len(tiles.STATES)


def test_command_line_of_the_sm90_class(tmp_path, capsys):
    picture = tmp_path / "tiles.svg"
    command = ["--capability", "90", "--causal", "--seqlen-q", "300", "--picture", str(picture)]
    assert cli.main(["sim", *command]) == 0
    printed = capsys.readouterr().out
    assert "_causal_sm90_" in printed
    assert "verdict       pass" in printed
    found = {m[2]: int(m[1]) for m in re.finditer(r"(\d+) tiles ([^\n]+)", printed)}
    assert found[tiles.STATES["full"][1]] > 0 and found[tiles.STATES["masked"][1]] > 0
    assert found[tiles.STATES["wasted"][1]] == found[tiles.STATES["missed"][1]] == 0


def test_command_line_of_the_backward(capsys):
    small = ["--head-dim", "32", "--seqlen-q", "70", "--seqlen-k", "90", "--causal"]
    assert cli.main(["sim", "--pass", "bwd", *small]) == 0
    printed = capsys.readouterr().out
    assert "kernel        flash_bwd_hdim32_fp16_causal_fused_sm80" in printed
    assert "verdict       pass" in printed
    for name in ("dq", "dk", "dv"):
        assert f"\n{name}\nmax error " in printed


def test_picture_of_another_kind_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["sim", "--picture", str(tmp_path / "tiles.png")])
    assert "expected a name that ends in .svg" in capsys.readouterr().err
