"""Implements ``python -m flashcute profile``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import benchmarking as bm
from .. import heuristics
from ..arguments import failures
from ..bench.serving import Serving
from ..config import BwdConfig, FwdConfig
from ..extras import install_command
from ..jit import cache, kernels
from ..jit.progress import Progress
from ..jit.toolchain import BuildError
from . import backward, disassembly, explain, ncu, page, static, text


def _value(field: str, word: str) -> object:
    if word in ("true", "false"):
        return word == "true"
    # Longer numbers are in no field's range, and Python converts no more than 4300 digits.
    return int(word) if word.lstrip("-").isdecimal() and len(word) <= 10 else word[:20]


def choose_config(
    args: argparse.Namespace, changes: Sequence[str]
) -> tuple[FwdConfig | BwdConfig, str]:
    """Returns the configuration that the arguments describe, changed as asked, and its target.

    Raises:
        ValueError: for an unknown field or an invalid value.
    """
    target = args.target or _target_here()
    capability = kernels.capability_of(target)
    problem = _shape(args).problem(args.dtype)
    choose = heuristics.choose_fwd if args.what == "fwd" else heuristics.choose_bwd
    config = choose(problem, capability)
    try:
        return _changed(config, changes), target
    except (TypeError, ValueError) as error:  # TypeError: a word was compared with numbers
        raise ValueError(
            f"flashcute profile: {error}; say other values with --set or --compare, or leave them "
            "out"
        ) from error


def _changed(config: FwdConfig | BwdConfig, changes: Sequence[str]) -> FwdConfig | BwdConfig:
    """Returns ``config`` with each FIELD=VALUE of ``changes`` applied."""
    fields = _fields(config)
    values: dict[str, object] = {}
    for change in changes:
        field, equals, word = change.partition("=")
        if field not in fields or not equals:
            raise ValueError(
                f"expected FIELD=VALUE with FIELD in {', '.join(sorted(fields))}, got {change!r}"
            )
        name, _, part = field.partition(".")
        if part:  # of a tile
            tile = values.get(name, getattr(config, name))
            values[name] = dataclasses.replace(tile, **{part: _value(field, word)})
        else:
            values[name] = _value(field, word)
    return dataclasses.replace(config, **values)


def _fields(config: FwdConfig | BwdConfig) -> set[str]:
    """Returns what ``--set`` may name: fields, and those of tiles as ``dkv.step``."""
    found = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        parts = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found |= {f"{field.name}.{part.name}" for part in parts} or {field.name}
    return found


def _target_here() -> str:
    import torch

    if torch.cuda.is_available():
        return "{}{}".format(*torch.cuda.get_device_capability())
    return "90"


def _static(args: argparse.Namespace, changes: Sequence[str]) -> dict[str, object]:
    config, target = choose_config(args, changes)
    capability = kernels.capability_of(target)
    if args.file is not None:
        binary = disassembly.read_binary(args.file)
        return static.profile(binary, capability, args.head_dim)
    disassembly.find_cuobjdump()  # fails before a build if it is missing
    artefact = _built(config, target)
    binary = disassembly.read_binary(artefact.path)
    spills, log = artefact.meta["spill_bytes"], artefact.meta["log"]
    return static.profile(binary, capability, config.head_dim, config, spills, log)


def _static_backward(
    args: argparse.Namespace, changes: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Returns the static profiles of a backward's kernels with products, by what they compute."""
    config, target = choose_config(args, changes)
    capability = kernels.capability_of(target)
    disassembly.find_cuobjdump()
    artefact = _built(config, target)
    meta = artefact.meta
    found = backward.kernels(disassembly.read_binaries(artefact.path), config)
    return {
        kernel.computes: static.profile(
            binary, capability, config.head_dim, kernel, meta["spill_bytes"], meta["log"]
        )
        for kernel, binary in found
    }


def _built(config: FwdConfig | BwdConfig, target: str) -> cache.Artefact:
    """Returns the kernel's entry, built with a progress display if it is missing."""
    _, artefact = kernels.find_built(config, target)
    if artefact is not None:
        return artefact
    with Progress(1) as shown:
        (result,) = kernels.build_kernels([(config, target)], 1, shown.finished, shown.running)
    if result.artefact is None:
        raise BuildError(result.error)
    return result.artefact


def _shape(args: argparse.Namespace) -> bm.Shape:
    seqlen_q = args.seqlen_q or (1 if args.cache else 4096)
    usual = bm.sweep_shape(args.head_dim, seqlen_q, args.causal)
    heads = args.heads or usual.h
    shape = bm.Shape(
        b=args.batch or (16 if args.cache else usual.b),
        seqlen_q=seqlen_q,
        seqlen_k=args.seqlen_k or (8192 if args.cache else seqlen_q),
        h=heads,
        h_k=args.heads_k or heads,
        d=args.head_dim,
        causal=args.causal,
    )
    if heads % shape.h_k:
        raise ValueError(
            f"flashcute profile: expected --heads-k to divide --heads, got {shape.h_k} and {heads}"
        )
    if not args.cache:
        return shape
    if args.page_size and shape.seqlen_k % args.page_size:
        raise ValueError(
            "flashcute profile: expected --page-size to divide --seqlen-k, got "
            f"{args.page_size} and {shape.seqlen_k}; say lengths of whole pages"
        )
    return Serving(**dataclasses.asdict(shape), page_size=args.page_size)


def _counters(args: argparse.Namespace, changes: Sequence[str]) -> dict[str, object]:
    """Profiles with Nsight Compute, and adds the static profile of the machine code."""
    import torch

    ncu.find_ncu()
    if not torch.cuda.is_available():
        raise disassembly.ToolError(
            "flashcute profile: expected an NVIDIA GPU that torch can use, got none; say --static "
            "for what the machine code alone can tell"
        )
    config, target = choose_config(args, changes)
    shape = _shape(args)
    capability = kernels.capability_of(target)
    if isinstance(config, BwdConfig):
        if not config.fused:
            raise ValueError(
                "flashcute profile: expected a backward with one kernel for all gradients, got "
                f"{config.full_name}, which has several; say --static for each of them"
            )
        _built(heuristics.choose_fwd(shape.problem(args.dtype), capability), target)
    _built(config, target)  # here and not under the profiler
    with tempfile.TemporaryDirectory(prefix="flashcute-profile-") as folder:
        file = args.report or Path(folder) / "profile.ncu-rep"
        file.parent.mkdir(parents=True, exist_ok=True)
        ncu.run(config, shape, file)
        report = ncu.read(file)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    result = explain.profile(report, config, shape, capability, sms)
    try:
        if isinstance(config, BwdConfig):
            forms = _static_backward(args, changes)
            machine_code = forms["all"]
            if len(forms) > 1:
                result["notes"].append(
                    f"the machine code is that of {machine_code['kernel']!r}; the launch may be "
                    "of another form, which --static shows, too"
                )
        else:
            machine_code = _static(args, changes)
        wanted = explain.expected(result, machine_code)
        return result | {"expected_percent": wanted, "static": machine_code}
    except disassembly.ToolError as error:
        result["notes"].append(f"nothing from the machine code: {error}")
        return result


def _profile(args: argparse.Namespace, changes: Sequence[str]) -> dict[str, object]:
    if args.file is not None and not args.static:
        raise ValueError("flashcute profile: expected --static with --file, got --file alone")
    report = _static(args, changes) if args.static else _counters(args, changes)
    return {"machine": bm.machine_info(), **report}


def _load(path: Path) -> dict[str, object]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["kind"] in ("static", "ncu"):
            text.report_text(report)  # fails unless all fields are there
            return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"flashcute profile: expected a profile saved with --json, got {path}: {error!r}"
        ) from error
    raise ValueError(f"flashcute profile: expected a saved profile, got kind={report['kind']!r}")


def _one(args: argparse.Namespace, spec: str) -> dict[str, object]:
    if spec.endswith(".json"):
        return _load(Path(spec))
    return _profile(args, [*args.set, *(spec.split(",") if spec != "default" else [])])


def run(args: argparse.Namespace) -> int:
    """Profiles what the arguments describe; returns 0, or 1 with a message on standard error."""
    if args.html and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "flashcute profile: expected the package matplotlib for --html, found none; "
            f"{install_command('profile')}"
        )
    if args.page_size and not args.cache:
        raise ValueError(
            f"flashcute profile: expected --cache with --page-size, got --page-size "
            f"{args.page_size} alone; add --cache, or leave it out"
        )
    if args.cache and args.what == "bwd":
        raise ValueError(
            "flashcute profile: expected --cache with --pass fwd, got --pass bwd: a call over a "
            "cache has no gradients; leave one of them out"
        )
    if args.what == "bwd" and args.static and (args.file or args.compare):
        raise ValueError(
            "flashcute profile: expected --static with --pass bwd without --file and --compare: a "
            "backward may be several kernels; leave them out, or compare without --static"
        )
    try:
        if args.what == "bwd" and args.static:
            reports = list(_static_backward(args, args.set).values())
            payload = {"kind": "kernels", "machine": bm.machine_info(), "profiles": reports}
        elif args.compare:
            reports = [_one(args, spec) for spec in args.compare]
            payload = {"kind": "comparison", "profiles": reports}
        else:
            payload = _profile(args, args.set)
            reports = [payload]
    except (disassembly.ToolError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    # Files before standard output, which the reader may close early.
    writes = []
    if args.json is not None:
        writes.append((args.json, lambda: bm.write_json(args.json, payload)))
    if args.html is not None:
        writes.append((args.html, lambda: page.write(args.html, reports)))
    unwritten = failures("profile", *writes)
    if args.compare:
        print(f"A: {reports[0]['kernel']}\nB: {reports[1]['kernel']}\n")
        print(text.comparison(reports))
    else:
        print("\n\n\n".join(map(text.report_text, reports)))
    print(*unwritten, sep="\n", end="\n" if unwritten else "", file=sys.stderr)
    return 1 if unwritten else 0
