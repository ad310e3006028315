"""``python -m flashcute build`` builds kernels ahead of use, ``info`` shows what is there, ``sim``
runs one on the CPU, ``bench`` measures speed, ``profile`` says what a kernel costs and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import env, heuristics
from .arguments import positive
from .bench import cli as bench_cli
from .config import DTYPES, HEAD_DIMS, FwdConfig
from .jit import binding, build, cache, kernels, sources, toolchain
from .jit.toolchain import BuildError
from .occupancy import ctas_per_sm
from .profiling import cli as profile_cli
from .sim import cli as sim_cli


def targets_at_hand() -> list[str]:
    """sm numbers of the GPUs that torch sees, without repetition."""
    import torch

    devices = range(torch.cuda.device_count())
    numbers = ["{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices]
    return sorted(set(numbers), key=int)


def _choose_targets(args: argparse.Namespace) -> list[str]:
    targets = args.target or targets_at_hand()
    if not targets:
        raise ValueError(
            "flashcute build: expected a GPU to build for, got none; name it with --target, e.g. "
            "--target 80 90"
        )
    for target in targets:
        kernels.capability_of(target)
    return targets


def _choose_configs(args: argparse.Namespace, target: str) -> list[FwdConfig]:
    causals = {"yes": (True,), "no": (False,), "both": (False, True)}[args.causal or "both"]
    capability = kernels.capability_of(target)
    return [
        config
        for head_dim in args.head_dim or HEAD_DIMS
        for dtype in args.dtype or DTYPES
        for causal in causals
        for config in heuristics.configs_in_use(dtype, head_dim, causal, capability)
    ]


def _progress_bar(total: int) -> tuple[Callable[[build.BuildResult], None], Callable[[], None]]:
    from tqdm import tqdm

    bar = tqdm(total=total, unit="file", desc="build", dynamic_ncols=True)

    def update(result: build.BuildResult) -> None:
        bar.update()
        if result.error is not None:
            bar.write(result.error, file=sys.stderr)
        else:
            bar.set_postfix_str(f"{result.unit.name} {result.unit.target}")

    return update, bar.close


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [any(isinstance(row[i], int) for row in rows) for i in range(len(header))]

    def cell(text: str, i: int) -> str:
        return text.rjust(widths[i]) if right[i] else text.ljust(widths[i])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def _resources(artefact: cache.Artefact) -> tuple[int, int]:
    return artefact.meta["registers"], artefact.meta["spill_bytes"]


def run_build(args: argparse.Namespace) -> int:
    """Builds what the arguments select; returns 1 if anything failed."""
    if not (args.all or args.head_dim or args.dtype or args.causal):
        raise ValueError(
            "flashcute build: expected a choice of kernels, got none; say --all, or choose with "
            "--head-dim, --dtype and --causal"
        )
    targets = _choose_targets(args)
    specs = [(config, target) for target in targets for config in _choose_configs(args, target)]
    update, close = _progress_bar(len(specs) + 1)
    try:
        results = [binding.build_binding()]
        update(results[0])
        results += kernels.build_kernels(specs, args.jobs, update)
    finally:
        close()
    folder = sources.prebuilt_dir() if args.prebuilt else args.output
    if folder is not None:
        kernels.place(results, folder)
    rows = [
        (r.unit.name, r.unit.target, *_resources(r.artefact), round(r.seconds))
        for r in results
        if r.artefact is not None and r.unit.suffix == ".cu"
    ]
    if rows:
        print(_table(("kernel", "target", "registers", "spilled bytes", "seconds"), rows))
    failed = sum(result.artefact is None for result in results)
    where = folder if folder is not None else cache.cache_dir()
    print(f"{len(results) - failed} of {len(results)} shared objects in {where}")
    return 1 if failed else 0


def _or_error(probe: Callable[[], object]) -> str:
    """What a probe says, or why it cannot: `info` describes a broken set-up, it does not break."""
    try:
        return str(probe())
    except (BuildError, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{error}"


def _describe_gpus() -> str:
    import torch

    lines = []
    for device in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(device)
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        lines.append(f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {memory}")
    return "; ".join(lines) or "none that torch can use"


def _describe_torch() -> str:
    import torch

    return f"{torch.__version__} (CUDA {torch.version.cuda})"


def _describe_compiler(find: Callable[[], toolchain.Compiler]) -> str:
    compiler = find()
    release = next((x for x in compiler.version.splitlines() if "release" in x), None)
    return f"{compiler.path}, {release or compiler.version.splitlines()[0]}"


def _describe_cache() -> str:
    folder = cache.cache_dir()
    try:
        cache.check_private(folder)
    except OSError as error:
        return f"{folder} ({error.strerror})"
    files = list(folder.glob("*.so"))
    size = sum(file.stat().st_size for file in files) / 2**20
    return f"{folder} ({len(files)} shared objects, {size:.1f} MiB)"


_KERNEL_COLUMNS = (
    *("kernel", "target", "where", "threads", "shared memory"),
    *("registers", "spilled bytes", "CTAs per SM", "limit"),
)


def _kernel_row(config: FwdConfig, target: str) -> list[object]:
    """One line of the kernel table; a kernel that is not built has its planned resources only."""
    where, artefact = kernels.find_built(config, target)
    head = [config.full_name, f"sm_{target}", where, config.threads, config.smem_bytes]
    if artefact is None:
        return [*head, "-", "-", "-", ""]
    registers, spills = _resources(artefact)
    fit = ctas_per_sm(config.threads, registers, config.smem_bytes, kernels.capability_of(target))
    return [*head, registers, spills, fit.ctas, fit.limit]


def run_info(args: argparse.Namespace) -> int:
    """Prints GPU, toolchain, folders, environment variables and every shipped kernel."""
    facts = {
        "flashcute": lambda: importlib.metadata.version("flashcute"),
        "python": platform.python_version,
        "torch": _describe_torch,
        "GPU": _describe_gpus,
        "nvcc": lambda: _describe_compiler(toolchain.find_nvcc),
        "C++ compiler": lambda: _describe_compiler(toolchain.find_host_compiler),
        "CUTLASS": lambda: sources.cutlass_version() or "headers not there",
        "sources": sources.source_root,
        "prebuilt": lambda: f"{sources.prebuilt_dir()} ({len(_prebuilt())} shared objects)",
        "cache": _describe_cache,
        "jobs": build.default_jobs,
    }
    for name, probe in facts.items():
        print(f"{name + ':':<14}{_or_error(probe)}")
    rows = [(v.name, os.environ.get(v.name, "-"), v.default, v.meaning) for v in env.VARIABLES]
    print("\n" + _table(("variable", "value", "default", "meaning"), rows))
    targets = args.target or targets_at_hand() or ["80", "90"]
    rows = [_kernel_row(config, t) for t in targets for config in _choose_configs(args, t)]
    print("\n" + _table(_KERNEL_COLUMNS, rows))
    return 0


def _prebuilt() -> list[Path]:
    return list(sources.prebuilt_dir().glob("*/*.so"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashcute", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    target = argparse.ArgumentParser(add_help=False)
    target.add_argument(
        "--target", nargs="+", metavar="SM", help="sm numbers, e.g. 80 90 (default: the GPUs here)"
    )
    choice = argparse.ArgumentParser(add_help=False, parents=[target])
    choice.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS)
    choice.add_argument("--dtype", nargs="+", choices=DTYPES)
    choice.add_argument("--causal", choices=("yes", "no", "both"))
    make = commands.add_parser("build", parents=[choice], help="build kernels and the binding")
    make.set_defaults(run=run_build)
    make.add_argument("--all", action="store_true", help="every shipped kernel")
    make.add_argument(
        "--jobs", type=positive, help="compilers at the same time (default: by cores and memory)"
    )
    place = make.add_mutually_exclusive_group()
    place.add_argument("-o", "--output", type=Path, help="also copy the results to this folder")
    place.add_argument(
        "--prebuilt", action="store_true", help="also copy them into the package itself"
    )
    info = commands.add_parser("info", parents=[choice], help="show set-up and kernels")
    info.set_defaults(run=run_info)
    simulate = commands.add_parser("sim", help="run one kernel on the CPU and check it")
    simulate.set_defaults(run=sim_cli.run)
    sim_cli.add_arguments(simulate)
    bench = commands.add_parser("bench", help="measure the forward pass beside its peers")
    bench.set_defaults(run=bench_cli.run)
    bench_cli.add_arguments(bench)
    profile = commands.add_parser("profile", help="what a kernel costs and why")
    profile.set_defaults(run=profile_cli.run)
    profile_cli.add_arguments(profile)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (BuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
