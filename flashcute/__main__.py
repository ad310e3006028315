"""``python -m flashcute build`` builds kernels ahead of use, ``info`` shows set-up and kernels,
``doctor`` what the machine lacks, ``cache`` what was built, ``sim`` runs a kernel on the CPU,
``bench`` measures speed, ``profile`` says what a kernel costs and why."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from . import __version__, doctor, env, shipped
from .arguments import is_out_of_memory, output_folder, positive
from .bench import cli as bench_cli
from .config import DTYPES, HEAD_DIMS, MASKS
from .jit import binding, build, cache, kernels, sources, toolchain
from .jit.progress import Progress
from .jit.toolchain import BuildError
from .occupancy import ctas_per_sm
from .profiling import cli as profile_cli
from .sim import cli as sim_cli

_DAY = 24 * 3600.0
_PASSES = "fwd", "bwd"
# Imported modules that are installed by a package of the same name.
_PACKAGES = ("torch", "numpy", "ninja", "tqdm", "matplotlib")


def targets_at_hand() -> list[str]:
    """Returns the sm numbers of the GPUs that torch sees, without repetition."""
    import torch

    devices = range(torch.cuda.device_count())
    numbers = ["{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices]
    return sorted(set(numbers), key=int)


def _choose_targets(args: argparse.Namespace) -> list[str]:
    at_hand = [] if args.target else targets_at_hand()
    targets = args.target or [target for target in at_hand if target in kernels.TARGETS]
    for target in sorted(set(at_hand) - set(targets)):
        print(f"flashcute build: there are no kernels for sm_{target}, left out", file=sys.stderr)
    if not targets:
        raise ValueError(
            "flashcute build: expected a GPU to build for, got none; name it with --target, e.g. "
            "--target 80 90"
        )
    for target in targets:
        kernels.capability_of(target)
    return list(dict.fromkeys(targets))


def _choose_configs(args: argparse.Namespace, target: str) -> list[kernels.AnyConfig]:
    """Returns the configurations of dense calls that the arguments choose, and those of the other
    shipped calls unless --causal is yes or no."""
    masks = {"yes": ("causal",), "no": ("none",), "both": MASKS}[args.causal or "both"]
    capability = kernels.capability_of(target)
    configs = shipped.dense_configs(capability)
    if masks == MASKS:
        configs += shipped.configs_of_calls(capability)
    return [
        config
        for config in configs
        if config.kind in (args.passes or _PASSES)
        and config.head_dim in (args.head_dim or HEAD_DIMS)
        and config.dtype in (args.dtype or DTYPES)
        and config.mask in masks
    ]


def _chooses(args: argparse.Namespace) -> bool:
    """Returns whether the arguments choose kernels."""
    return bool(args.all or args.passes or args.head_dim or args.dtype or args.causal)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with columns as wide as their widest cell and numbers right-aligned."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [any(isinstance(row[i], int) for row in rows) for i in range(len(header))]

    def cell(text: str, i: int) -> str:
        return text.rjust(widths[i]) if right[i] else text.ljust(widths[i])

    return "\n".join("  ".join(cell(t, i) for i, t in enumerate(line)).rstrip() for line in lines)


def _resources(artefact: cache.Artefact) -> tuple[int, int]:
    return artefact.meta["registers"], artefact.meta["spill_bytes"]


def _exit(number: int, frame: object) -> None:
    """Handles a signal by leaving the command as after an error."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _ends_compilers() -> Iterator[None]:
    """Ends the compilers of a build when SIGTERM ends the command, which Python alone would not do.

    It is for builds only: a handler runs once the main thread returns from C, which a command that
    waits for a GPU may not do.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_build(args: argparse.Namespace) -> int:
    """Builds what the arguments select; returns 1 if anything failed."""
    if not _chooses(args):
        raise ValueError(
            "flashcute build: expected a choice of kernels, got none; say --all, or choose with "
            "--pass, --head-dim, --dtype and --causal"
        )
    targets = _choose_targets(args)
    specs = [(config, target) for target in targets for config in _choose_configs(args, target)]
    # Whatever is missing is reported before the first compiler starts.
    toolchain.find_nvcc()
    sources.require_cutlass()
    folder = sources.prebuilt_dir() if args.prebuilt else args.output
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    with _ends_compilers(), Progress(len(specs) + 1) as shown:
        results = [binding.build_binding(shown.finished, shown.running)]
        results += kernels.build_kernels(specs, args.jobs, shown.finished, shown.running)
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
    """Returns what a probe says or its error: `info` describes a broken set-up and never fails."""
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


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _describe_cache() -> str:
    folder = cache.cache_dir()
    if not folder.exists():
        return f"{folder} does not exist: nothing was built yet"
    try:
        found = cache.contents(folder)
    except OSError as error:
        return f"{folder} ({error.strerror})"
    entries = sum(any(path.suffix == ".so" for path in paths) for paths in found.values())
    size = sum(cache.bytes_of(path) for paths in found.values() for path in paths)
    return f"{folder} ({entries} shared objects, {_mib(size)})"


_KERNEL_COLUMNS = (
    *("kernel", "target", "where", "threads", "shared memory"),
    *("registers", "spilled bytes", "CTAs per SM", "limit"),
)


def _kernel_row(config: kernels.AnyConfig, target: str) -> list[object]:
    """Returns a row of the kernel table; a kernel that is not built has planned resources only."""
    where, artefact = kernels.find_built(config, target)
    head = [config.full_name, f"sm_{target}", where, config.threads, config.smem_bytes]
    if artefact is None:
        return [*head, "-", "-", "-", ""]
    registers, spills = _resources(artefact)
    fit = ctas_per_sm(config.threads, registers, config.smem_bytes, kernels.capability_of(target))
    return [*head, registers, spills, fit.ctas, fit.limit]


def run_info(args: argparse.Namespace) -> int:
    """Prints set-up, environment variables and how many kernels are built; rows for them if asked.

    The rows come first, so that the summary, which most users want, is at the end of the output.
    """
    targets = args.target
    # RuntimeError: the driver is too old for torch, although torch counts the GPUs.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        targets = targets or [t for t in targets_at_hand() if t in kernels.TARGETS]
    targets = list(dict.fromkeys(targets or ["80", "90"]))
    rows = {t: [_kernel_row(config, t) for config in _choose_configs(args, t)] for t in targets}
    if _chooses(args):
        print(_table(_KERNEL_COLUMNS, [row for of in rows.values() for row in of]) + "\n")
    facts = {
        "flashcute": lambda: __version__,
        "python": platform.python_version,
        "torch": _describe_torch,
        "GPU": _describe_gpus,
        "nvcc": toolchain.find_nvcc_alone,
        "C++ compiler": toolchain.find_host_compiler,
        "CUTLASS": lambda: sources.cutlass_version() or "headers not there",
        "sources": sources.source_root,
        "prebuilt": lambda: f"{sources.prebuilt_dir()} ({len(_prebuilt())} shared objects)",
        "cache": _describe_cache,
        "jobs": build.default_jobs,
    }
    for name, probe in facts.items():
        print(f"{name + ':':<14}{_or_error(probe)}")
    table = [(v.name, os.environ.get(v.name, "-"), v.default, v.meaning) for v in env.VARIABLES]
    print("\n" + _table(("variable", "value", "default", "meaning"), table) + "\n")
    for target, of in rows.items():
        where = Counter(row[2] for row in of)
        counts = ", ".join(f"{where[place]} {place}" for place in kernels.PLACES)
        print(f"{f'sm_{target}:':<14}{len(of)} kernels: {counts}")
    return 0


def _entry_row(stem: str, paths: Sequence[Path]) -> list[object]:
    """Returns a row of the cache's table, whatever state the entry is in."""
    size = sum(map(cache.bytes_of, paths))
    built = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(p.stat().st_mtime for p in paths)))
    try:
        (record,) = (path for path in paths if path.suffix == ".json")
        meta = json.loads(record.read_bytes())
        return [meta["name"], meta["target"], -(-size // 1024), round(meta["seconds"]), built]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return [stem, "incomplete", -(-size // 1024), "-", built]


def run_cache(args: argparse.Namespace) -> int:
    """Lists, measures or removes what the user's cache holds."""
    if args.older_than is not None and args.action != "clean":
        raise ValueError(
            f"flashcute cache: expected clean with --older-than, got {args.action}; leave it out"
        )
    folder = cache.cache_dir()
    if not folder.exists():
        print(_describe_cache())
        return 0
    if args.action == "clean":
        age = None if args.older_than is None else args.older_than * _DAY
        count, size = build.clean(age)
        print(f"removed {count} files and unfinished builds, {_mib(size)}, from {folder}")
        return 0
    if args.action == "list":
        rows = [_entry_row(stem, paths) for stem, paths in cache.contents(folder).items()]
        if rows:
            print(_table(("name", "target", "KiB", "seconds to build", "built"), rows) + "\n")
    print(_describe_cache())
    return 0


def _prebuilt() -> list[Path]:
    return list(sources.prebuilt_dir().glob("*/*.so"))


class _Parser(argparse.ArgumentParser):
    """A parser whose --help and --version fail where they cannot be written.

    It refuses unknown arguments itself: argparse would leave that to the main parser, whose usage
    message lists the commands and not the options of the command.
    """

    def parse_known_args(self, args=None, namespace=None):
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        # Overridden because argparse ignores an OSError here.
        (file or sys.stderr).write(message or "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m flashcute", description=__doc__.replace("``", ""))
    parser.add_argument("--version", action="version", version=f"flashcute {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument(
        "--target", nargs="+", metavar="SM", help="sm numbers, e.g. 80 90 (default: the GPUs here)"
    )
    choice.add_argument(
        "--pass",
        dest="passes",
        nargs="+",
        choices=_PASSES,
        help="forward or backward (default: both)",
    )
    choice.add_argument(
        "--head-dim",
        type=int,
        nargs="+",
        choices=HEAD_DIMS,
        help="that kernels are compiled for (default: all)",
    )
    choice.add_argument("--dtype", nargs="+", choices=DTYPES, help="of the tensors (default: both)")
    choice.add_argument(
        "--causal", choices=("yes", "no", "both"), help="kernels with the causal mask (both)"
    )
    make = commands.add_parser("build", parents=[choice], help="build kernels and the binding")
    make.set_defaults(run=run_build)
    make.add_argument("--all", action="store_true", help="every shipped kernel")
    make.add_argument(
        "--jobs", type=positive, help="compilers at the same time (default: by cores and memory)"
    )
    place = make.add_mutually_exclusive_group()
    place.add_argument(
        *("-o", "--output"), type=output_folder, help="also copy the results to this folder"
    )
    place.add_argument(
        "--prebuilt", action="store_true", help="also copy them into the package itself"
    )
    info = commands.add_parser("info", parents=[choice], help="show set-up and kernels")
    info.set_defaults(run=run_info)
    info.add_argument(
        "--all", action="store_true", help="also a row for each kernel; a choice shows the chosen"
    )
    examine = commands.add_parser("doctor", help="say what this machine lacks, and how to mend it")
    examine.set_defaults(run=doctor.run)
    stored = commands.add_parser("cache", help="show or remove what was built on first use")
    stored.set_defaults(run=run_cache)
    stored.add_argument(
        "action",
        nargs="?",
        choices=("list", "size", "clean"),
        default="list",
        help="entries with their sizes (default), the sum, or remove them; they can be built again",
    )
    stored.add_argument(
        "--older-than", type=positive, metavar="DAYS", help="clean: only what is older"
    )
    simulate = commands.add_parser("sim", help="run one kernel on the CPU and check it")
    simulate.set_defaults(run=sim_cli.run)
    sim_cli.add_arguments(simulate)
    bench = commands.add_parser("bench", help="measure forward and backward beside their peers")
    bench.set_defaults(run=bench_cli.run)
    bench_cli.add_arguments(bench)
    profile = commands.add_parser("profile", help="what a kernel costs and why")
    profile.set_defaults(run=profile_cli.run)
    profile_cli.add_arguments(profile)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    try:
        env.read()
        return args.run(args)
    except BrokenPipeError:
        raise
    except (BuildError, ValueError) as error:
        print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("flashcute"):
            raise
        name = error.name or ""
        what, mend = f"package {name}", f"`pip install {name}`"
        if name not in _PACKAGES:  # on an index, a module's name may be anyone's
            what, mend = f"module {name}", "reinstall the package that it belongs to"
        print(f"flashcute {args.command}: expected the {what}, found none; {mend}", file=sys.stderr)
    except OSError as error:
        print(f"flashcute {args.command}: {error}", file=sys.stderr)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(
            f"flashcute {args.command}: expected sizes that fit into memory, got: "
            f"{str(error).splitlines()[0]}",
            file=sys.stderr,
        )
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; what a user can cause ends in a message and an exit status."""
    if sys.stderr is None:  # it is closed, with which argparse and tqdm would fail
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("flashcute: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        # The pipe's reader has ended, as with `| head -1`, or the disk is full. Python flushes the
        # rest at exit, which would raise again, so standard output becomes the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"flashcute: cannot write the output: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
