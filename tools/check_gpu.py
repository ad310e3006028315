"""Everything that needs a GPU, in one bounded run: build, tests, model, benchmarks.

    python tools/check_gpu.py --out build/gpu
    python tools/check_gpu.py --out build/gpu --phases build bench --limit bench=300
    python tools/check_gpu.py --out build/gpu --phases build models inputs options
    python tools/check_gpu.py --out build/gpu --phases build models --bench=--sustained
    python tools/check_gpu.py --out build/gpu --phases build sanitize
    python tools/check_gpu.py --out build/gpu --phases test-all
    python tools/check_gpu.py --phases fuzz --fuzz="--families kvcache --cases 5000"
    python tools/check_gpu.py --phases bwd-build bwd-64 bwd-128 bwd-32 bwd-96 bwd-192 bwd-256

Each phase is a process of its own with a time limit and a log under the output folder. A phase that
fails or runs out of time does not stop the next one. Short tables are printed last, and the exit
status is 0 only if every phase passed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
GRACE_S = 15  # seconds between SIGINT and SIGKILL to a phase
RESERVE_S = 10  # seconds for the summary


@dataclasses.dataclass(frozen=True)
class Phase:
    """One step of the run.

    Attributes:
        limit: Seconds, unless ``--limit`` says otherwise.
        command: Returns the arguments after the interpreter for the options and the time limit.
        shown: Number of characters of the log's end that the summary shows.
        default: Whether it runs unless ``--phases`` says otherwise.
    """

    limit: float
    command: Callable[[argparse.Namespace, float], list[str]]
    shown: int
    default: bool = True


def _build(args: argparse.Namespace, _seconds: float) -> list[str]:
    return ["-m", "flashcute", "build", "--all", *(["--jobs", str(args.jobs)] if args.jobs else [])]


def _tests(args: argparse.Namespace, _seconds: float) -> list[str]:
    report = f"--junitxml={args.out / 'tests.xml'}"
    return ["-m", "pytest", "tests/cuda", "-q", report, *shlex.split(args.pytest)]


def _test_all(args: argparse.Namespace, _seconds: float) -> list[str]:
    in_simulator = (f"tests/sim/test_kernels{of}.py" for of in ("", "_sm90", "_of_calls"))
    return ["-m", "pytest", "--all", "-q", "tests/test_shipped_kernels.py", *in_simulator]


def _bwd(*arguments: str) -> Callable[[argparse.Namespace, float], list[str]]:
    """Makes the command of the sm90 backward's tests in bf16; ``-v`` names each before it runs."""

    def command(args: argparse.Namespace, _seconds: float) -> list[str]:
        tests = ["-m", "pytest", "tests/cuda/test_cuda_bwd_sm90.py", "-v"]
        return [*tests, *arguments, *shlex.split(args.pytest)]

    return command


def _model(args: argparse.Namespace, _seconds: float) -> list[str]:
    model = ["--model", str(args.model)] if args.model else []
    return ["examples/demo.py", "--out", str(args.out / "demo.json"), *model]


def _training(args: argparse.Namespace, _seconds: float) -> list[str]:
    return ["examples/train_gpt.py", "--check", "--out", str(args.out)]


def _generation(args: argparse.Namespace, _seconds: float) -> list[str]:
    return ["examples/generate.py", "--check", "--json", str(args.out / "generate.json")]


def _bench(name: str, *arguments: str) -> Callable[[argparse.Namespace, float], list[str]]:
    """Makes the command of a benchmark whose result is the file ``name``."""

    def command(args: argparse.Namespace, seconds: float) -> list[str]:
        limit = ["--time-limit", str(round(max(1.0, seconds - 25)))]
        out = ["--json", str(args.out / name)]
        return ["-m", "flashcute", "bench", *arguments, *out, *limit, *shlex.split(args.bench)]

    return command


def _fuzz(args: argparse.Namespace, seconds: float) -> list[str]:
    limit = ["--seconds", str(round(max(1.0, seconds - 25)))]
    out = ["--json", str(args.out / "fuzz.json")]
    return ["tools/fuzz_gpu.py", *out, *limit, *shlex.split(args.fuzz)]


def _sanitize(args: argparse.Namespace, seconds: float) -> list[str]:
    return ["tools/sanitize.py", "--out", str(args.out), "--time-limit", str(round(seconds - 5))]


_INPUTS = (
    *("--inputs", "all", "--dtypes", "bf16", "fp16"),
    *("--head-dims", "64", "128", "256", "--seqlens", "1024", "4096"),
)
PHASES = {
    "info": Phase(60, lambda _args, _seconds: ["-m", "flashcute", "info"], 2500),
    "build": Phase(300, _build, 500),
    "tests": Phase(300, _tests, 2000),
    "model": Phase(120, _model, 2800),
    "bench": Phase(200, _bench("fwd.json"), 7000),
    # Some 45 shapes; 12 points of 13 distributions in two dtypes. Sustained needs a larger --limit.
    "models": Phase(150, _bench("fwd_models.json", "--shapes", "models"), 12000, default=False),
    "inputs": Phase(200, _bench("fwd_inputs.json", *_INPUTS), 12000, default=False),
    # Windows, sinks, packed sequences, softcap, ALiBi, dropout: kernels that are not prebuilt, and
    # FlexAttention's, are compiled first.
    "options": Phase(400, _bench("fwd_options.json", "--shapes", "options"), 14000, default=False),
    "backward": Phase(200, _bench("bwd.json", "--pass", "bwd"), 7000, default=False),
    # 33 points of five page sizes; kernels for pages are compiled first.
    "decode": Phase(500, _bench("decode.json", "--pass", "decode"), 30000, default=False),
    "append": Phase(200, _bench("append.json", "--pass", "append"), 12000, default=False),
    # Models on SDPA and transformers; few kernels.
    "integrations": Phase(
        300, _bench("integrations.json", "--pass", "integrations"), 4000, default=False
    ),
    # The sm90 class's backward, parts of which may never have run, is built first; then each head
    # dimension is tested in a process of its own, so that no hang hides another.
    "bwd-build": Phase(200, _bwd("-k", "bf16", "--setup-only"), 500, default=False),
    **{
        f"bwd-{d}": Phase(60, _bwd("-k", f"bf16 and hdim{d}_"), 1500, default=False)
        for d in (64, 128, 32, 96, 192, 256)
    },
    "training": Phase(200, _training, 3000, default=False),
    "generation": Phase(400, _generation, 2000, default=False),
    # What `make test` leaves out, where there are processors enough: every kernel that ships.
    "test-all": Phase(500, _test_all, 1000, default=False),
    # Thousands of seeded cases of some families; most kernels that they use do not ship.
    "fuzz": Phase(240, _fuzz, 6000, default=False),
    # Not by default: the tool may be missing, or the driver may not permit it.
    "sanitize": Phase(400, _sanitize, 4000, default=False),
}


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets phases receive SIGINT.

    A shell starts background jobs with SIGINT ignored, and children inherit that. A handler is not
    inherited through exec, so one is installed meanwhile.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_phase(command: list[str], log: pathlib.Path, seconds: float) -> tuple[str, float]:
    """Runs ``command`` with its output in ``log``; returns its outcome and its seconds.

    At the limit it gets SIGINT first, so that pytest still prints its report. Then its process
    group is killed.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        with _interruptible():
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code = process.wait(timeout=seconds)
            outcome = "passed" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            outcome = "OUT OF TIME"
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcome, time.monotonic() - start


def _tail(log: pathlib.Path, characters: int) -> str:
    written = log.read_bytes().decode(errors="replace").rstrip()
    # A progress bar rewrites its line: keep only its last state.
    lines = [line.rpartition("\r")[2] for line in written.split("\n")]
    text = "\n".join(lines)
    return text if len(text) <= characters else "[...]" + text[-characters:]


def _limits(pairs: list[str]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        name, equals, seconds = pair.partition("=")
        if name not in PHASES or not equals or not seconds.isdecimal():
            raise SystemExit(
                f"check_gpu: expected --limit PHASE=SECONDS with PHASE in {', '.join(PHASES)}, "
                f"got {pair!r}"
            )
        limits[name] = float(seconds)
    return limits


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "gpu")
    usual = [name for name, phase in PHASES.items() if phase.default]
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=usual)
    parser.add_argument("--total", type=float, default=560, help="seconds for all phases")
    parser.add_argument("--limit", nargs="+", default=[], help="PHASE=SECONDS")
    parser.add_argument("--jobs", type=int, help="compilers at the same time")
    parser.add_argument("--model", type=pathlib.Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--pytest", default="", help="more arguments for the tests")
    parser.add_argument("--bench", default="", help="more arguments for every benchmark")
    parser.add_argument("--fuzz", default="", help="more arguments for tools/fuzz_gpu.py")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.limits = _limits(args.limit)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.total - RESERVE_S
    results: dict[str, dict] = {}
    for name in args.phases:
        phase = PHASES[name]
        left = end - time.monotonic()
        seconds = min(args.limits.get(name, phase.limit), left - GRACE_S)
        if seconds < 1:
            results[name] = {"outcome": "NOT RUN, no time left", "seconds": 0.0}
        else:
            print(f"{name} ...", flush=True)
            command = [sys.executable, *phase.command(args, seconds)]
            outcome, took = run_phase(command, args.out / f"{name}.log", seconds)
            results[name] = {"outcome": outcome, "seconds": round(took, 1), "command": command}
        (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    for name in results:
        log = args.out / f"{name}.log"
        if log.is_file():
            print(f"\n---- {name}\n{_tail(log, PHASES[name].shown)}")
    print("\n---- summary")
    for name, result in results.items():
        print(f"{name:8} {result['seconds']:7.1f} s  {result['outcome']}")
    return 0 if all(result["outcome"] == "passed" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
