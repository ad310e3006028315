from __future__ import annotations

import dataclasses
from pathlib import Path

import tile_times

from flashcute import benchmarking as bm
from flashcute import heuristics

RESULT = Path(__file__).parents[1] / "benchmarks/results/tiles_sm90_h200.json"


def test_every_way_to_compute_every_problem_was_timed() -> None:
    measured = tile_times.load(RESULT)
    assert [problem for problem, _ in measured] == list(tile_times.problems())
    for problem, us in measured:
        assert set(us) == set(tile_times.ways(problem))


def test_chosen_are_the_fastest_or_nearly() -> None:
    shares = [share for share, *_ in tile_times.quality(RESULT)]
    assert bm.geomean(shares) > 0.995
    assert min(shares) > 0.93


def test_a_worse_choice_is_seen(monkeypatch) -> None:
    """If all tiles have the same speed, the amount of work alone decides, which is worse."""
    equal = {
        key: tuple(dataclasses.replace(tile, speed=100) for tile in tiles)
        for key, tiles in heuristics._SM90_TILES.items()
    }
    monkeypatch.setattr(heuristics, "_SM90_TILES", equal)
    assert bm.geomean([share for share, *_ in tile_times.quality(RESULT)]) < 0.98


def test_fit_finds_the_speeds_that_made_the_times(monkeypatch, tmp_path) -> None:
    """The times are made with the model from one speed, which the fit must find."""
    rows = []
    for problem in tile_times.problems():
        us = {}
        for name, (config, packed) in tile_times.ways(problem).items():
            work, _ = heuristics.work(problem, config, packed, 132)
            us[name] = 4 * config.head_dim * work * 132 / 500 / 1e6
        rows.append({**dataclasses.asdict(problem), "us": us})
    bm.write_json(tmp_path / "times.json", {"rows": rows})
    monkeypatch.setattr(tile_times, "FITTED_US", 0)
    speeds = tile_times.fit(tmp_path / "times.json")
    assert len(speeds) == sum(map(len, heuristics._SM90_TILES.values()))
    assert all(abs(speed - 500) < 1 for speed in speeds.values())
