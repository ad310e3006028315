"""Seeded cases of tests/cuda by the thousand, checked by many processes that share one GPU.

    python tools/fuzz_gpu.py --families kvcache --cases 5000 --seconds 200
    python tools/fuzz_gpu.py --families options varlen --head-dims 64 128 --seconds 200
    python tools/fuzz_gpu.py --families bwd bwd_options --classes 90 --dry-run

A family is a module of tests/cuda, which draws a case from a seed and checks it. The same seeds run
in each kernel class. The kernels that they use are known before. Missing ones are built, those that
most cases need first, while cases whose kernels are there run. A case that fails is printed with
the command that repeats it alone, and so is a case in which a process dies or that takes too long;
other processes go on. At the time limit, or when interrupted, the results so far are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import connection

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/cuda", "tools")]

FIRST_SEED = 100_000  # beyond those of the tests
CHUNK = 8  # cases that a process gets at once
GRACE_S = 10  # seconds that cases running at the time limit may still take
OTHERS_S = 5  # seconds that a case waits for other processes to free memory
START_S = 300  # seconds for a process to load torch and the binding
LINE_S = 15  # seconds between lines about the progress
MEMORY = 0.9  # share of the GPU's memory that all processes keep between cases
PEAK = 3  # times its share that a process may take during a case
BROKEN = "broken"
NICE = 5  # niceness of workers: compilers have priority, as no case runs without its kernels


@dataclasses.dataclass(frozen=True)
class Family:
    """A module with functions ``make(seed)``, ``check(case)``, which returns what is wrong or None,
    and ``kernels_of(case, gpu)``."""

    module: str
    make: str = "make_case"
    check: str = "check"
    classes: tuple[str, ...] = ("80", "90")

    def function(self, name: str):
        return getattr(importlib.import_module(self.module), name)


FAMILIES = {
    "grid": Family("test_cuda_grid"),
    "options": Family("test_cuda_options"),
    "varlen": Family("test_cuda_varlen"),
    "kvcache": Family("test_cuda_kvcache"),
    "bwd": Family("test_cuda_bwd"),
    "bwd_options": Family("test_cuda_bwd_options"),
    "bwd_varlen": Family("test_cuda_bwd_varlen"),
    "bwd_sm90": Family("test_cuda_bwd_sm90", "drawn", "check_drawn", ("90",)),
}
Group = tuple[str, str]  # name of the family, kernel class


@dataclasses.dataclass
class Plan:
    """The seeds of each group, and for each seed the kernels that it uses."""

    kernels: dict[Group, dict[int, set]]

    @property
    def demand(self) -> collections.Counter:
        """Kernels, each with the number of cases that use it."""
        return collections.Counter(
            config
            for seeds in self.kernels.values()
            for configs in seeds.values()
            for config in configs
        )

    def table(self) -> Iterator[str]:
        for (name, arch), seeds in self.kernels.items():
            configs = set().union(*seeds.values())
            backward = sum(config.kind == "bwd" for config in configs)
            yield (
                f"{name:12} class {arch}: {len(seeds):6} cases, {len(configs):4} kernels, "
                f"{backward} of them backwards"
            )


def make_plan(args: argparse.Namespace, families: Mapping[str, Family], gpu) -> Plan:
    import conditions

    from flashcute import heuristics

    plan = Plan({})
    for name, arch in itertools.product(args.families, args.classes):
        family = families[name]
        if arch not in family.classes or (arch == "90" and gpu.capability != (9, 0)):
            continue
        make, kernels_of = family.function(family.make), family.function("kernels_of")
        seeds = plan.kernels[name, arch] = {}
        with conditions.choosing(arch):
            for seed in itertools.count(args.first_seed):
                if len(seeds) == args.cases:
                    break
                case = make(seed)
                head_dim = heuristics.instantiated_head_dim(case.d)
                if args.head_dims is None or head_dim in args.head_dims:
                    seeds[seed] = kernels_of(case, gpu)
    return plan


def _run_case(family: Family, seed: int) -> str | None:
    """Runs a case; returns what is wrong with it, or None."""
    import torch

    case = family.function(family.make)(seed)
    check = family.function(family.check)
    for _ in range(OTHERS_S):
        with contextlib.suppress(torch.OutOfMemoryError):
            return check(case)
        torch.cuda.empty_cache()
        time.sleep(1)
    return check(case)


def _is_broken() -> bool:
    """Returns whether no kernel runs in this process any more."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def work(
    tasks: connection.Connection, families: Mapping[str, Family], share: float, nice: int
) -> None:
    """Runs in a worker: takes (group, seeds), sends (seed, what is wrong, seconds) for each.

    It sends BROKEN where a case leaves it unable to run the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.nice(nice)
    import conditions
    import torch

    from flashcute import ops

    torch.set_num_threads(1)
    of_class = conditions.choosing
    if torch.cuda.is_available():
        ops.load()
        of_class = conditions.class_of_kernels
        torch.cuda.set_per_process_memory_fraction(min(PEAK * share, 1.0))
        share *= torch.cuda.get_device_properties(0).total_memory
        for dtype in (torch.float64, torch.float16, torch.bfloat16):  # loads torch's own kernels
            x = torch.ones(64, 64, device="cuda", dtype=dtype)
            (x @ x).sum().item()
    with conditions.outputs_of_nan(), contextlib.suppress(EOFError):
        tasks.send(None)
        while True:
            (name, arch), seeds = tasks.recv()
            with of_class(arch):
                for seed in seeds:
                    start = time.monotonic()
                    try:
                        failure = _run_case(families[name], seed)
                    except Exception as error:
                        case = families[name].function(families[name].make)(seed)
                        failure = f"{case}: {type(error).__name__}: {error}"
                        tasks.send((seed, failure, time.monotonic() - start))
                        if _is_broken():
                            tasks.send(BROKEN)
                            return
                    else:
                        tasks.send((seed, failure, time.monotonic() - start))
            if torch.cuda.is_available() and torch.cuda.memory_reserved() > share:
                torch.cuda.empty_cache()


def build(results: connection.Connection, specs: Sequence[tuple], jobs: int | None) -> None:
    """Runs in a process with its own group: builds kernels in order, sends (index, error)."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from flashcute import jit
    from flashcute.jit import build as builds
    from flashcute.jit import kernels

    def make(index: int) -> tuple[int, str | None]:
        try:
            (result,) = jit.build_kernels([specs[index]], jobs=1)
            return index, result.error
        except jit.BuildError as error:
            return index, str(error)

    missing = []
    for index, spec in enumerate(specs):
        if kernels.find_built(*spec)[1] is None:
            missing.append(index)
        else:
            results.send((index, None))
    results.send((len(missing), "missing"))
    with ThreadPoolExecutor(jobs or builds.default_jobs()) as pool:
        pool.submit(jit.load_binding)  # every worker waits for it
        try:
            for done in as_completed([pool.submit(make, index) for index in missing]):
                results.send(done.result())
        except BrokenPipeError:  # the parent was killed
            pool.shutdown(cancel_futures=True)


@dataclasses.dataclass
class Worker:
    """A process that checks cases.

    Attributes:
        left: Seeds without an answer, beginning with the one that runs; None until it is ready.
        since: When the case that runs was started.
    """

    process: multiprocessing.Process
    tasks: connection.Connection
    group: Group | None = None
    left: list[int] | None = None
    since: float = 0.0


class Fuzzer:
    """Runs a plan. ``cases`` and ``seconds`` count what each group did, ``failures`` is a list."""

    def __init__(self, plan: Plan, args: argparse.Namespace, families: Mapping[str, Family]):
        self.args, self.families = args, families
        self.cases, self.seconds = collections.Counter(), collections.Counter()
        self.failures: list[dict[str, object]] = []
        self.ready: dict[Group, collections.deque] = {}
        self.waiting: dict[object, list[tuple[Group, int]]] = collections.defaultdict(list)
        self.lacking: dict[tuple[Group, int], int] = {}
        for group, seeds in plan.kernels.items():
            self.ready[group] = collections.deque(s for s, configs in seeds.items() if not configs)
            for seed, configs in seeds.items():
                self.lacking[group, seed] = len(configs)
                for config in configs:
                    self.waiting[config].append((group, seed))
        # Among kernels of equal demand backwards come first: they take longest to compile.
        demand = plan.demand
        self.configs = sorted(demand, key=lambda c: (-demand[c], c.kind == "fwd", c.full_name))
        self.built, self.missing, self.unbuilt = 0, None, []
        self.workers: list[Worker] = []
        self.context = multiprocessing.get_context("spawn")
        self.start = time.monotonic()
        self.total = len(self.lacking)

    def run(self, target: str, show) -> None:
        """Runs until all is done or the time limit is reached; the processes have ended then."""
        results, sender = self.context.Pipe(duplex=False)
        specs = [(config, target) for config in self.configs]
        builder = self.context.Process(target=build, args=(sender, specs, self.args.jobs))
        builder.start()
        sender.close()
        try:
            while len(self.workers) < self.args.workers:
                self._hire()
            builds = [results]
            while builds or any(self.ready.values()) or any(w.left != [] for w in self.workers):
                now, end = time.monotonic(), self.start + self.args.seconds
                busy = any(worker.left for worker in self.workers)
                if now > end and (not busy or now > end + GRACE_S):
                    break
                if now <= end:
                    self._assign()
                self._receive(builds, connection.wait([*builds, *self._pipes()], timeout=0.2))
                self._dismiss_silent(now)
                show(self)
        finally:
            self._stop(builder)

    def _pipes(self) -> list[connection.Connection]:
        return [worker.tasks for worker in self.workers]

    def _hire(self) -> None:
        ours, theirs = self.context.Pipe()
        args = theirs, self.families, MEMORY / self.args.workers, NICE
        process = self.context.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        self.workers.append(Worker(process, ours, since=time.monotonic()))

    def _assign(self) -> None:
        for worker in self.workers:
            group = max(self.ready, key=lambda g: len(self.ready[g]))
            if worker.left != [] or not self.ready[group]:
                continue
            seeds = self.ready[group]
            # Chunks become smaller towards the end, so that all workers end at once.
            share = len(seeds) // len(self.workers) + 1
            worker.left = [seeds.popleft() for _ in range(min(CHUNK, share, len(seeds)))]
            worker.group, worker.since = group, time.monotonic()
            # The process died: _receive() sees the end of its pipe.
            with contextlib.suppress(OSError):
                worker.tasks.send((group, worker.left))

    def _receive(self, builds: list[connection.Connection], readable: list) -> None:
        for pipe in readable:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = EOFError
            if pipe in builds:
                if message is EOFError:
                    builds.clear()
                else:
                    self._built(*message)
                continue
            worker = next(w for w in self.workers if w.tasks is pipe)
            if message is EOFError:
                worker.process.join(5)
                self._replace(worker, f"the process ended ({worker.process.exitcode})")
            elif message is None:
                worker.left = []
            elif message == BROKEN:
                self.ready[worker.group].extendleft(reversed(worker.left))
                worker.left = []
                self._replace(worker, BROKEN)
            else:
                self._count(worker, *message)

    def _built(self, index: int, error: str | None) -> None:
        if error == "missing":
            self.missing = index
            return
        config = self.configs[index]
        if error is not None:
            self.unbuilt.append({"kernel": config.full_name, "error": error})
            print(f"\nNOT BUILT: {error}", flush=True)
            return
        self.built += 1
        for group, seed in self.waiting.pop(config):
            self.lacking[group, seed] -= 1
            if self.lacking[group, seed] == 0:
                self.ready[group].append(seed)

    def _count(self, worker: Worker, seed: int, failure: str | None, seconds: float) -> None:
        worker.left.remove(seed)
        worker.since = time.monotonic()
        self.cases[worker.group] += 1
        self.seconds[worker.group] += seconds
        if failure is not None:
            self._report(worker.group, seed, failure)

    def _report(self, group: Group, seed: int, failure: str) -> None:
        family, arch = group
        repeat = (
            f"python tools/fuzz_gpu.py --families {family} --classes {arch} --first-seed {seed} "
            "--cases 1 --workers 1"
        )
        found = {"family": family, "class": arch, "seed": seed, "failure": failure}
        self.failures.append(found | {"repeat": repeat})
        print(f"\nFAILED in class {arch}: {failure}\n{repeat}", flush=True)

    def _replace(self, worker: Worker, why: str) -> None:
        """Replaces a worker: the case that ran, if any, has failed; others get what is left."""
        self.workers.remove(worker)
        worker.process.kill()
        worker.process.join(GRACE_S)  # the process may wait for the driver
        worker.tasks.close()
        if worker.left is None:
            raise SystemExit(f"fuzz_gpu: {why} before it took a case; see its messages above")
        if worker.left:
            seed, *rest = worker.left
            self.ready[worker.group].extendleft(reversed(rest))
            self.cases[worker.group] += 1
            self.seconds[worker.group] += time.monotonic() - worker.since
            make = self.families[worker.group[0]].make
            case = self.families[worker.group[0]].function(make)(seed)
            self._report(worker.group, seed, f"{case}: {why}")
        self._hire()

    def _dismiss_silent(self, now: float) -> None:
        for worker in list(self.workers):
            limit = START_S if worker.left is None else self.args.case_seconds
            if worker.left != [] and now - worker.since > limit:
                self._replace(worker, f"nothing for {limit:g} s")

    def _stop(self, builder: multiprocessing.Process) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(builder.pid, signal.SIGTERM)  # ninja ends its compilers, too
        builder.terminate()
        for worker in self.workers:
            worker.process.kill()
        for process in (builder, *(worker.process for worker in self.workers)):
            process.join(GRACE_S)

    def results(self) -> dict[str, object]:
        groups = sorted({group for group, _ in self.lacking})
        failed = collections.Counter((x["family"], x["class"]) for x in self.failures)
        planned = collections.Counter(group for group, _ in self.lacking)
        return {
            "first_seed": self.args.first_seed,
            "head_dims": self.args.head_dims,
            "workers": self.args.workers,
            "seconds": round(time.monotonic() - self.start, 1),
            "kernels": len(self.configs),
            "kernels_missing_at_start": self.missing,
            "kernels_not_built": self.unbuilt,
            "families": {
                f"{family}, class {arch}": {
                    "cases": self.cases[family, arch],
                    "failures": failed[family, arch],
                    "not_run": planned[family, arch] - self.cases[family, arch],
                    "seconds_of_all_processes": round(self.seconds[family, arch], 1),
                }
                for family, arch in groups
            },
            "failures": self.failures,
        }


class Progress:
    """A display of progress: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="fuzz", unit="case", disable=None, dynamic_ncols=True)
        self._last = time.monotonic()

    def __call__(self, fuzzer: Fuzzer) -> None:
        done, now = fuzzer.cases.total(), time.monotonic()
        kernels = f"{fuzzer.built} of {len(fuzzer.configs)} kernels"
        state = f"{kernels}, {len(fuzzer.failures)} failures"
        if not self._bar.disable:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(done - self._bar.n)
        elif now - self._last >= LINE_S:
            self._last = now
            seconds = now - fuzzer.start
            print(f"{seconds:5.0f} s: {done} of {fuzzer.total} cases, {state}", flush=True)

    def close(self) -> None:
        self._bar.close()


def gpu_of_machine():
    """Returns this machine's GPU; None without one, where ``--dry-run`` assumes an H200."""
    import torch
    from asked import Gpu

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)


def parse(argv: Sequence[str] | None, families: Mapping[str, Family]) -> argparse.Namespace:
    from flashcute import arguments
    from flashcute.config import HEAD_DIMS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--classes", nargs="+", choices=("80", "90"), default=["80", "90"])
    help_of_cases = "of each family in each class"
    parser.add_argument("--cases", type=arguments.positive, default=1000, help=help_of_cases)
    parser.add_argument("--first-seed", type=arguments.natural, default=FIRST_SEED)
    help_of_dims = "instantiated ones, of which cases are drawn: fewer kernels; all by default"
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, help=help_of_dims)
    parser.add_argument("--seconds", type=arguments.seconds, default=200, help="builds included")
    workers = min(16, len(os.sched_getaffinity(0)))
    parser.add_argument("--workers", type=arguments.positive, default=workers, help="processes")
    parser.add_argument("--jobs", type=arguments.positive, help="compilers at the same time")
    help_of_limit = "a process that answers nothing for so long is ended"
    parser.add_argument("--case-seconds", type=arguments.seconds, default=120, help=help_of_limit)
    place = ROOT / "build" / "gpu" / "fuzz.json"
    parser.add_argument("--json", type=arguments.output_file, default=place, help="the results")
    parser.add_argument("--dry-run", action="store_true", help="count cases and kernels, run none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, families: Mapping[str, Family] = FAMILIES) -> int:
    args = parse(argv, families)
    from asked import Gpu

    from flashcute.benchmarking import machine_info

    os.environ["OMP_NUM_THREADS"] = "1"  # for the worker processes, which inherit it
    gpu = gpu_of_machine()
    if gpu is None and not args.dry_run:
        raise SystemExit("fuzz_gpu: expected a GPU, torch sees none; --dry-run needs none")
    plan = make_plan(args, families, gpu or Gpu())
    print(*plan.table(), f"{len(plan.demand)} kernels in all", sep="\n", flush=True)
    if args.dry_run:
        return 0
    fuzzer, interrupted = Fuzzer(plan, args, families), False
    show = Progress(fuzzer.total)
    try:
        fuzzer.run("".join(map(str, gpu.capability)), show)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        show.close()
        results = {"machine": machine_info(), **fuzzer.results()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    for group, found in results["families"].items():
        print(f"{group}: {found['cases']} cases, {found['failures']} failures", end="")
        print(f", {found['not_run']} not run" if found["not_run"] else "")
    print(f"{results['seconds']} s, {args.json}")
    if fuzzer.failures or fuzzer.unbuilt or not fuzzer.cases:
        return 1
    return 128 + signal.SIGINT if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
