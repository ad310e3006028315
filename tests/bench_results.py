"""Made-up results of the sweep, for tests of tables and pictures."""

from __future__ import annotations

import dataclasses

from flashcute import benchmarking as bm
from flashcute.bench import serving


def row(d=64, s=512, causal=False, difference=0.0, dtype="bf16", group=1, sustained=False, **us):
    """Returns a row as the sweep writes it, with the speeds that follow from ``us``."""
    shape = bm.sweep_shape(d, s, causal)
    shape = dataclasses.replace(shape, h_k=shape.h // group)
    tflops = {name: round(shape.flops / t / 1e6, 1) for name, t in us.items()}
    found = {
        "dtype": dtype,
        **dataclasses.asdict(shape),
        "us": us,
        "tflops": tflops,
        "percent_of_ceiling": {name: round(x / 8, 1) for name, x in tflops.items()},
        "trusted": "fa2",
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
    """Returns a row of the shape with options that is called ``name``."""
    options = {
        option: options_and_times.pop(option, usual)
        for option, usual in {"window": (-1, -1), "sinks": False, "softcap": 0.0}.items()
    }
    made = row(64, difference=difference, **options_and_times)
    if lengths:
        made |= {"b": len(lengths), "seqlen_q": max(lengths), "seqlen_k": max(lengths)}
    made["trusted"] = "torch"
    return made | options | {"alibi": False, "lengths": lengths, "model": name}


def serving_row(name, page_size=0, append="", ceiling=4e12, difference=0.0, **us):
    """Returns a row of the point over a KV cache that is called ``name``."""
    point = next(points[name] for points in serving.POINTS.values() if name in points)
    shape = dataclasses.replace(point, page_size=page_size, append=append)
    figures = serving.figures(shape, us, {"read_bytes_per_second": ceiling})
    found = {"dtype": "bf16", **dataclasses.asdict(shape), "inputs": "normal", "model": name}
    found |= {"us": us, "tflops": {x: round(shape.flops / t / 1e6, 1) for x, t in us.items()}}
    compared = {"trusted": "torch", "difference": {"flashcute": difference}}
    return found | figures | compared | {"missing": {}}


def serving_result(*rows, what="decode", **changes):
    """Returns a result of ``--pass decode`` with these rows."""
    ceiling = {"read_bytes_per_second": 4e12, "sum_bf16_bytes_per_second": 4e12}
    ceiling["sum_float32_bytes_per_second"] = 3.5e12
    made = {"pass": what, "ceiling": ceiling, "host_us": {}}
    made["contenders"] = ("flashcute", "fa2", "cudnn", "fa3", "fa3_ragged")
    made |= {"host_us_decode": {"flashcute": 14.0}, "host_us_decode_int": {"flashcute": 18.5}}
    made["host_us_decode_plan"] = {"flashcute": 9.5}
    return result(*rows, **made | changes)


def result(*rows, **changes):
    """Returns a result of the sweep with these rows."""
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
