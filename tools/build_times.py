"""CPU time that each shipped kernel takes to compile: `python tools/build_times.py --limit 45`.

Kernels are compiled one after the other into an empty cache. The time is the CPU time of all the
compiler's processes, so it does not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashcute import jit, shipped
from flashcute.config import KERNEL_CLASSES, FwdConfig


def cpu_seconds() -> float:
    """Returns user and system time of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compile_time(config: FwdConfig, target: str) -> float:
    """Builds one kernel; returns its CPU seconds.

    Raises:
        RuntimeError: with the compiler's message if it fails.
    """
    before = cpu_seconds()
    (result,) = jit.build_kernels([(config, target)], jobs=1)
    if result.error is not None:
        raise RuntimeError(result.error)
    return cpu_seconds() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, choices=KERNEL_CLASSES)
    parser.add_argument("--target", default="90", help="sm number")
    parser.add_argument("--match", default="", help="part of the names of the kernels to compile")
    parser.add_argument(
        "--limit", type=float, default=45, help="CPU seconds that a kernel may take"
    )
    args = parser.parse_args()
    times = {}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["FLASHCUTE_CACHE_DIR"] = empty
        for stem, config in shipped.instantiations().items():
            if config.arch == args.arch and args.match in stem:
                times[stem] = compile_time(config, args.target)
                print(f"{times[stem]:6.1f} s  {stem}", flush=True)
    if not times:
        parser.error(
            f"--match: expected part of a kernel's name, got {args.match!r}: none of "
            f"sm{args.arch} has it"
        )
    slowest = max(times, key=times.__getitem__)
    print(f"{len(times)} kernels, {sum(times.values()):.0f} s; slowest {slowest}")
    over = {stem: time for stem, time in times.items() if time > args.limit}
    if over:
        print(f"over {args.limit:g} s: {', '.join(over)}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
