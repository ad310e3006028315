"""Made-up results of the sweep, for tests of tables and pictures."""

from __future__ import annotations

import dataclasses

from flashcute import benchmarking as bm


def row(d=64, s=512, causal=False, difference=0.0, dtype="bf16", group=1, sustained=False, **us):
    """A row as the sweep writes it, its speeds from times in microseconds."""
    shape = bm.sweep_shape(d, s, causal)
    shape = dataclasses.replace(shape, h_k=shape.h // group)
    tflops = {name: round(shape.flops / t / 1e6, 1) for name, t in us.items()}
    found = {
        "dtype": dtype,
        **dataclasses.asdict(shape),
        "us": us,
        "tflops": tflops,
        "percent_of_ceiling": {name: round(x / 8, 1) for name, x in tflops.items()},
        "difference": {"flashcute": difference},
        "missing": {},
    }
    if sustained:
        found["us_sustained"] = {name: 1.25 * t for name, t in us.items()}
        found["tflops_sustained"] = {name: x / 1.25 for name, x in tflops.items()}
        found["percent_of_ceiling_sustained"] = {name: x / 8 for name, x in tflops.items()}
        state = {"sm_mhz": 1512.0, "power_w": 654.9700000000001, "power_capped": 0.9}
        found["gpu_sustained"] = {name: dict(state) for name in us}
    return found


def option_row(name, difference=0.0, lengths=(), **options_and_times):
    """A row of the shape with options ``name``."""
    options = {
        option: options_and_times.pop(option, usual)
        for option, usual in {"window": (-1, -1), "sinks": False, "softcap": 0.0}.items()
    }
    made = row(64, difference=difference, **options_and_times)
    if lengths:
        made |= {"b": len(lengths), "seqlen_q": max(lengths), "seqlen_k": max(lengths)}
    return made | options | {"alibi": False, "lengths": lengths, "model": name}


def result(*rows, **changes):
    """A result with these rows."""
    made = {
        "machine": {"gpu": "GPU X"},
        "device": "cuda",
        "contenders": ("flashcute", "fa2", "cudnn", "fa3"),
        "ceiling": {"tflops": 800.0, "tflops_sustained": 680.0, "bytes_per_second": 4.3e12},
        "rows": list(rows),
        "host_us": {"flashcute": 20.0},
        "gpu_samples": {},
        "stopped_early": False,
    }
    return made | changes
