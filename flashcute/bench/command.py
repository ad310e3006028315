"""Implements ``python -m flashcute bench``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from .. import benchmarking as bm
from ..arguments import failures
from ..config import HEAD_DIMS, BwdConfig, FwdConfig
from ..extras import install_command
from ..heuristics import choose_bwd, choose_fwd
from ..jit import BuildError, kernels
from ..jit.progress import Progress
from ..problem import FwdProblem, rounded_length, typical_length
from . import (
    models,
    option_peers,
    peers,
    plots,
    serving,
    serving_peers,
    serving_table,
    sweep,
    table,
)
from .cli import INPUTS, MASKS, SEQLENS
from .options import Option
from .serving import Serving
from .sweep import Variant

_ON_GPUS = ("fa2", "cudnn", "fa3", "fa3_ragged")  # peers without an implementation for CPU tensors
_APART = ("ring", "integrations")  # passes with a protocol of their own

# Sizes that take about a minute on a CPU.
_CPU_SEQLENS = (64, 128, 256)
_CPU_TOKENS = 256
_CPU_REPEATS = (5, 1)
_CPU_FLUSH = 64 << 20  # larger than most CPUs' caches


def _options(args: argparse.Namespace) -> sweep.Options:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "flashcute bench: expected an NVIDIA GPU that torch can use for --device cuda, found "
            "none; leave it out to measure the CPU path"
        )
    repeats, warmup = (bm.REPEATS, bm.WARMUP) if device == "cuda" else _CPU_REPEATS
    if args.sustained and device == "cpu":
        raise ValueError("flashcute bench: expected a GPU for --sustained, found none")
    own = dict(args.peer_module)  # a module may take the place of a peer
    refused = [name for name in args.peers or () if name in _ON_GPUS and name not in own]
    if refused and device == "cpu":
        raise ValueError(
            "flashcute bench: expected --peers that run on the CPU, where no GPU is measured, got "
            f"{', '.join(refused)}, which need a GPU; say --peers torch, or leave it out"
        )
    flush = bm.FLUSH_BYTES if device == "cuda" else _CPU_FLUSH
    if device == "cuda" and "bwd" in args.what:
        # GPUs with less memory also clear it more slowly.
        memory = torch.cuda.get_device_properties(0).total_memory
        flush = max(flush, min(bm.FLUSH_BYTES_AUTOGRAD, memory // 16))
    return sweep.Options(
        device=device,
        names=("flashcute", *(args.peers or ())),
        repeats=args.repeats or repeats,
        warmup=args.warmup or warmup,
        sustained=args.sustained,
        flush_bytes=flush,
        time_limit=args.time_limit,
        what=args.what,
    )


def _problem(variant: Variant) -> FwdProblem:
    """Returns the call as the choice of a kernel sees it."""
    problem = variant.shape.problem(variant.dtype)
    if not isinstance(variant.shape, Option):
        return problem
    option = variant.shape
    problem = dataclasses.replace(
        problem,
        window=None if option.window == (-1, -1) else option.window,
        softcap=option.softcap > 0,
        alibi=option.alibi,
        dropout=option.dropout > 0,
        varlen=bool(option.lengths),
    )
    if not option.lengths:
        return problem
    total = sum(option.lengths)
    return dataclasses.replace(
        problem,
        b=rounded_length(option.b),
        seqlen_q=typical_length(total, option.b, option.seqlen_q),
        seqlen_k=typical_length(total, option.b, option.seqlen_k),
    )


def configs_for(
    problems: Iterable[FwdProblem], choices: Iterable[Callable]
) -> list[FwdConfig | BwdConfig]:
    """Returns the kernels that ``choices``, e.g. :func:`choose_fwd`, take here for problems."""
    capability = torch.cuda.get_device_capability()
    sms = torch.cuda.get_device_properties().multi_processor_count
    pairs = itertools.product(choices, problems)
    return list(dict.fromkeys(choose(problem, capability, sms) for choose, problem in pairs))


def configs_of(
    wanted: Iterable[Iterable[Variant]], what: str, names: Collection[str] = ()
) -> list[FwdConfig | BwdConfig]:
    """Returns the kernels of a sweep on this GPU; a backward also needs those of its forward, and
    the contender ``plain``, where ``names`` has it, those of calls without options."""
    choices = [choose_fwd] if what in ("fwd", *serving.PASSES) else [choose_fwd, choose_bwd]
    variants = [variant for point in wanted for variant in point]
    problems = [_problem(variant) for variant in variants]
    for variant in variants if option_peers.PLAIN in names else ():
        if isinstance(variant.shape, Option):
            with contextlib.suppress(NotImplementedError):
                shape = option_peers.without_options(variant.shape)
                problems.append(shape.problem(variant.dtype))
    return configs_for(problems, choices)


def build(configs: Iterable[FwdConfig | BwdConfig]) -> None:
    """Builds kernels in parallel; without it the calls would build them one by one.

    Raises:
        BuildError: with the compiler's messages.
    """
    target = "".join(map(str, torch.cuda.get_device_capability()))
    missing = [(c, target) for c in configs if kernels.find_built(c, target)[1] is None]
    if not missing:
        return
    with Progress(len(missing)) as shown:
        results = kernels.build_kernels(missing, None, shown.finished, shown.running)
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise BuildError("\n".join(errors))


def _points(args: argparse.Namespace, on_gpu: bool) -> list[list[Variant]]:
    """Returns the points that the arguments ask for: the sweep's, then the named shapes."""
    inputs = list(INPUTS) if "all" in args.inputs else list(dict.fromkeys(args.inputs))
    if args.what in serving.PASSES:
        tokens = args.tokens or (None if on_gpu else _CPU_TOKENS)
        return [
            [Variant(dtype, shape, model=name) for dtype in args.dtypes for shape in shapes]
            for name, shapes in serving.points(args, tokens).items()
        ]
    found = []
    if "sweep" in args.shapes:
        found += sweep.points(
            args.dtypes,
            args.head_dims or [d for d in HEAD_DIMS if d >= 64],
            args.masks or MASKS,
            args.groups or [1],
            args.seqlens or (SEQLENS if on_gpu else _CPU_SEQLENS),
            args.tokens or (bm.TOTAL_TOKENS if on_gpu else _CPU_TOKENS),
            inputs,
        )
    elif args.head_dims or args.masks or args.groups or args.seqlens:
        raise ValueError(
            "flashcute bench: expected --head-dims, --masks, --groups and --seqlens with the sweep "
            f"only, got --shapes {' '.join(args.shapes)}; add sweep to it, or name the models "
            "wanted, as in --shapes llama"
        )
    chosen = models.select([name for name in args.shapes if name != "sweep"])
    if args.tokens or not on_gpu:
        tokens = args.tokens or _CPU_TOKENS
        chosen = {name: models.shrink(shape, tokens) for name, shape in chosen.items()}
    return found + sweep.model_points(chosen, args.dtypes, inputs)


def _usual(wanted: list[list[Variant]], device: str) -> tuple[str, ...]:
    """Returns the contenders on these points that run when --peers does not name any."""
    kinds = {type(variant.shape) for point in wanted for variant in point}
    lists = {bm.Shape: peers.NAMES, Option: option_peers.NAMES, Serving: serving_peers.NAMES}
    found = [name for kind, names in lists.items() if kind in kinds for name in names[device]]
    return tuple(dict.fromkeys(found))


def _measure(args: argparse.Namespace) -> dict:
    options = _options(args)
    on_gpu = options.device == "cuda"
    wanted = _points(args, on_gpu)
    if args.peers is None:
        options = dataclasses.replace(options, names=_usual(wanted, options.device))
    modules = {name: peers.load_module(name, path) for name, path in args.peer_module}
    names = tuple(dict.fromkeys([*options.names, *modules]))
    options = dataclasses.replace(options, names=names, modules=modules)
    if on_gpu:
        build(configs_of(wanted, options.what, names))
    else:
        print(table.CPU_NOTE, file=sys.stderr)
    rows = sum(map(len, wanted))
    with tqdm(total=rows, desc="bench", unit="row", dynamic_ncols=True) as bar:

        def show(row: dict) -> None:
            bar.update()
            bar.set_postfix_str(f"{row['dtype']} {table.describe(row)}")

        return sweep.run(wanted, options, show)


def _load(path: Path) -> dict:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        what = result.get("pass")
        if what == "integrations":
            raise ValueError(f"--pass {what}, which has no plots")
        speed = "tokens_per_second" if what == "ring" else "tflops"
        if result["rows"] and {"us", speed} <= set(result["rows"][0]):
            return result
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"flashcute bench: expected a result of bench with rows in {path}, got {error!r}"
        ) from error
    raise ValueError(f"flashcute bench: expected a result of bench with rows, got none in {path}")


def _draw(result: dict, folder: Path, stem: str) -> None:
    for path in plots.draw(result, folder, stem):
        print(path)


def _summary(result: dict) -> str:
    if result.get("pass") in _APART:
        return _apart(result["pass"]).summary(result)
    shown = serving_table if result.get("pass") in serving.PASSES else table
    return shown.summary(result)


def _apart(what: str):
    """Returns the module of a pass with a protocol of its own."""
    if what == "ring":  # imported here: torch.distributed and dynamo take a second
        from . import ring as module
    else:
        from . import integrations as module  # imported here: transformers takes several seconds
    return module


def _measure_apart(args: argparse.Namespace) -> tuple[dict, list[str]]:
    """Returns the result of a pass with a protocol of its own, and its wrong outputs."""
    module = _apart(args.what)
    # The delay keeps the bar hidden until a row is there: ``module.run`` checks arguments first.
    with tqdm(desc="bench", unit="row", dynamic_ncols=True, delay=0.1) as bar:
        result = module.run(args, lambda row: bar.update())
    if result["device"] == "cpu":
        print(table.CPU_NOTE + "\n")
    return result, module.disagreements(result)


def run(args: argparse.Namespace) -> int:
    """Measures or draws what the arguments describe; returns 0 if every output was right.

    Raises:
        ValueError: for arguments that do not go together, or a file that holds no result.
    """
    for name in ("page_sizes", "num_splits"):
        if getattr(args, name) is not None and args.what not in serving.PASSES:
            raise ValueError(
                f"flashcute bench: expected --{name.replace('_', '-')} with --pass decode and "
                f"append only, got --pass {args.what}; leave it out"
            )
    if args.nproc is not None and args.what != "ring":
        raise ValueError("flashcute bench: expected --nproc with --pass ring only; leave it out")
    if (args.plots or args.plot_only) and importlib.util.find_spec("matplotlib") is None:
        option = "--plot-only" if args.plot_only else "--plots"
        raise ValueError(
            f"flashcute bench: expected the package matplotlib for {option}, found none; "
            f"{install_command('plot')}" + ("" if args.plot_only else ", or leave out --plots")
        )
    if args.plot_only:
        result = _load(args.plot_only)
        try:
            print(_summary(result))
            _draw(result, args.plots or args.plot_only.parent, args.plot_only.stem)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"flashcute bench: expected a result of bench in {args.plot_only}, got one without "
                f"all of its fields: {error!r}"
            ) from error
        return 0
    if args.what in _APART:
        result, wrong = _measure_apart(args)
    else:
        result = _measure(args)
        wrong = table.disagreements(result)
    writes = []
    if args.json:
        writes.append((args.json, lambda: bm.write_json(args.json, result)))
    if args.plots and result["rows"]:
        stem = args.json.stem if args.json else "ring" if args.what == "ring" else "bench"
        writes.append((args.plots, lambda: _draw(result, args.plots, stem)))
    # Before the tables: the reader of standard output may close it early.
    unwritten = failures("bench", *writes)
    print(_summary(result))
    print(*wrong, *unwritten, sep="\n", file=sys.stderr)
    return 1 if wrong or unwritten or result["stopped_early"] else 0
