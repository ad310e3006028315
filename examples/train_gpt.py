"""A small GPT, trained with flashcute's attention and with PyTorch's, side by side.

python examples/train_gpt.py --check --out FOLDER    # GPT-2's size on a GPU, a tiny one on a CPU

All runs begin with the same weights and see the same text, in turns, a step each. Two more runs
measure the noise of training. One is PyTorch's attention again with the rows of each batch in
another order, which changes the order of sums alone; the other is another attention kernel of
PyTorch's, which also rounds in other places. flashcute's loss curve may differ from PyTorch's by at
most twice as much as the one of them that differs more (root mean square over all steps).

python examples/train_gpt.py --nproc 2               # or torchrun --nproc-per-node 2 examples/...

Several processes, one for each GPU, train two more models on sequences that are split over all of
them: one with ring attention, one with gathered keys (flashcute.distributed). Their loss curves
keep the same rule, with a third measure of the noise: PyTorch's attention with each batch in parts,
whose losses and gradients are added up. Each process trains all other models by itself.

Exits with 1 when a curve differs more, or when --check finds wrong gradients.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import importlib.util
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import (
    GPT,
    HEAD_DIM,
    Attention,
    allgather_attention,
    flashcute_attention,
    other_attention,
    read_text,
    ring_attention,
    sdpa_attention,
)
from torch import nn
from tqdm import tqdm

from flashcute import benchmarking as bm
from flashcute.arguments import is_out_of_memory, natural, output_folder, positive
from flashcute.extras import install_command

WARM_UP = 10  # steps that are not timed: kernels are built, memory is allocated
CHECKED_ROWS = 2  # rows of a batch: exact gradients in float64 hold all scores in memory
MOST_NOISE = 2.0  # allowed multiple of the noise: both figures are one draw each
MOST_ERROR = 2.0  # allowed multiple of PyTorch's error, as in flashcute/testing.py
# Default arguments by device.
DEFAULTS = {
    "cuda": {"steps": 300, "layers": 12, "heads": 12, "sequence": 2048, "batch": 16},
    "cpu": {"steps": 20, "layers": 2, "heads": 2, "sequence": 64, "batch": 4},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Kind(NamedTuple):
    """What distinguishes one run from the others.

    Attributes:
        permuted: Whether the rows of its batches are permuted.
        split: Whether its sequences are split over all processes.
        in_parts: Whether its batches are computed in as many parts as there are processes, one
            after the other.
    """

    attention: Attention
    permuted: bool = False
    split: bool = False
    in_parts: bool = False


RUNS = {
    "flashcute": Kind(flashcute_attention),
    "ring": Kind(ring_attention, split=True),
    "allgather": Kind(allgather_attention, split=True),
    "sdpa": Kind(sdpa_attention),
    "sdpa permuted": Kind(sdpa_attention, permuted=True),
    "sdpa other kernel": Kind(other_attention),
    "sdpa in parts": Kind(sdpa_attention, in_parts=True),
}
NOISE = ("sdpa permuted", "sdpa other kernel", "sdpa in parts")
THEIRS = ("sdpa", *NOISE)


@dataclasses.dataclass
class Settings:
    """Settings of training: sizes, seed, device, dtype of products, and number of processes."""

    steps: int
    layers: int
    heads: int
    sequence: int
    batch: int
    seed: int
    device: str
    dtype: str
    processes: int = 1

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.dtype]
        return torch.autocast(self.device, torch.bfloat16, enabled=dtype == torch.bfloat16)

    def model(self) -> GPT:
        """Returns a new model, with the same weights on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GPT(self.layers, self.heads, self.sequence).to(self.device)

    def batches(self, text: torch.Tensor) -> list[torch.Tensor]:
        """Returns the batch of each step, int64, ``(batch, sequence + 1)``."""
        if self.sequence >= len(text):
            sys.exit(
                f"train_gpt.py: expected --sequence below the {len(text)} bytes of the text, "
                f"got {self.sequence}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.steps, self.batch)
        starts = torch.randint(len(text) - self.sequence, size, generator=generator)
        places = torch.arange(self.sequence + 1)
        return [text[x[:, None] + places].long().to(self.device) for x in starts]


def gradients(model: GPT, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the gradient of every parameter, in float64."""
    names, weights = zip(*model.named_parameters(), strict=True)
    found = model.sum_over_processes(torch.autograd.grad(model(batch), weights))
    return {name: gradient.double() for name, gradient in zip(names, found, strict=True)}


def check_gradients(
    settings: Settings, names: Sequence[str], batch: torch.Tensor
) -> dict[str, object]:
    """Compares the first step's gradients with float64; errors are relative, by norm.

    Returns:
        The largest error of each attention over all parameters, the parameter where one of
        flashcute's is the largest multiple of PyTorch's, that multiple, and whether it is small
        enough.
    """
    model, batch = settings.model(), batch[:CHECKED_ROWS]
    exact = gradients(copy.deepcopy(model).double(), batch)
    errors: dict[str, dict[str, float]] = {}
    ours = [name for name in names if name not in THEIRS] or ["flashcute"]
    for name in ("sdpa", *ours):
        with settings.autocast():
            found = gradients(model.use(RUNS[name].attention, RUNS[name].split), batch)
        errors[name] = {x: ((found[x] - exact[x]).norm() / exact[x].norm()).item() for x in exact}
    over = {x: max(errors[name][x] for name in ours) / errors["sdpa"][x] for x in exact}
    worst = max(over, key=over.__getitem__)
    return {
        "largest_error": {name: max(values.values()) for name, values in errors.items()},
        "worst_parameter": worst,
        "worst_over_sdpa": over[worst],
        "passed": over[worst] <= MOST_ERROR,  # False for NaN
    }


class Run:
    """A training run: a model with its optimizer, and its losses, times and memory so far."""

    def __init__(self, settings: Settings, kind: Kind) -> None:
        self.settings, self.permuted = settings, kind.permuted
        self.parts = settings.processes if kind.in_parts else 1
        self.model = settings.model().use(kind.attention, kind.split)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), fused=settings.device == "cuda"
        )
        self.order = torch.Generator().manual_seed(settings.seed)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.bytes: list[int] = []  # peak of a step on the GPU, above what was allocated before it

    def step(self, batch: torch.Tensor) -> None:
        number, steps = len(self.losses), self.settings.steps
        if self.permuted:
            batch = batch[torch.randperm(len(batch), generator=self.order)]
        rate = min(1.0, (number + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * number / steps))
        self.optimizer.param_groups[0]["lr"] = 6e-4 * rate
        on_gpu = self.settings.device == "cuda"
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = torch.zeros((), device=self.settings.device)
        for part in batch.chunk(self.parts):
            with self.settings.autocast():
                share = self.model(part) / self.parts
            share.backward()
            loss += share.detach()
        weights = list(self.model.parameters())
        found = [loss, *(weight.grad for weight in weights)]
        loss, *summed = self.model.sum_over_processes(found)
        for weight, gradient in zip(weights, summed, strict=True):
            weight.grad = gradient
        nn.utils.clip_grad_norm_(weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the whole step
        self.seconds.append(time.perf_counter() - start)
        if on_gpu:
            self.bytes.append(torch.cuda.max_memory_allocated() - before)

    def figures(self) -> dict[str, object]:
        """Returns the losses, and medians over the steps after the first few."""
        first = min(WARM_UP, self.settings.steps // 2)
        seconds = statistics.median(self.seconds[first:])
        tokens = self.settings.batch * self.settings.sequence
        memory = statistics.median(self.bytes[first:]) / 2**20 if self.bytes else None
        return {
            "losses": self.losses,
            "step_ms": round(1e3 * seconds, 3),
            "tokens_per_second": round(tokens / seconds),
            "step_mib": memory,
        }


def train(settings: Settings, names: Sequence[str], batches: Sequence[torch.Tensor]) -> dict:
    """Trains all runs, a step of each in turns of changing order; returns their figures by name."""
    runs = {name: Run(settings, RUNS[name]) for name in names}
    quiet = dist.is_initialized() and dist.get_rank() > 0
    with tqdm(
        total=len(batches), desc="training", unit="step", dynamic_ncols=True, disable=quiet
    ) as bar:
        for number, batch in enumerate(batches):
            for name in bm.turn(runs, number):
                runs[name].step(batch)
            bar.update()
            bar.set_postfix_str(", ".join(f"{x} {run.losses[-1]:.3f}" for x, run in runs.items()))
    return {name: run.figures() for name, run in runs.items()}


def compare(runs: Mapping[str, Mapping]) -> dict[str, object]:
    """Returns the root mean square differences from PyTorch's losses.

    Also returns whether all of flashcute's are within the noise.
    """
    expected = runs["sdpa"]["losses"]
    found = {}
    for name in runs:
        if name != "sdpa":
            squares = [(x - y) ** 2 for x, y in zip(runs[name]["losses"], expected, strict=True)]
            found[name] = math.sqrt(statistics.fmean(squares))
    allowed = MOST_NOISE * max(found[name] for name in NOISE if name in found)
    passed = all(x <= allowed for name, x in found.items() if name not in NOISE)  # False for NaN
    return {"rms_difference_from_sdpa": found, "passed": passed}


def draw(result: Mapping, path: pathlib.Path) -> None:
    """Draws loss curves, their differences from PyTorch's, step time and memory."""
    from matplotlib.figure import Figure

    runs = result["runs"]
    colours = ("#d1495b", "#7b4fa3", "#3a8f5c", "#2a6f97", "#6c757d", "#bc8034", "#8c564b")
    of = dict(zip(RUNS, colours, strict=True))
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
    losses, differences = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    # Draws the thick line below the others.
    for name in sorted(runs, key=lambda name: name != "sdpa"):
        width, style = (4.5 if name == "sdpa" else 1.5), (":" if name in NOISE else "-")
        losses.plot(runs[name]["losses"], style, color=of[name], linewidth=width, label=name)
    losses.set_ylabel("loss, nats a byte")
    losses.legend()
    expected = runs.get("sdpa", {}).get("losses", ())
    for name, run in runs.items():
        if expected and name != "sdpa":
            pairs = zip(run["losses"], expected, strict=True)
            apart = [abs(x - y) or math.nan for x, y in pairs]  # a logarithmic axis cannot show 0
            rms = result["agreement"]["rms_difference_from_sdpa"][name]
            label = f"{name} - sdpa, root mean square {rms:.1e}"
            differences.plot(apart, ".", markersize=4, color=of[name], label=label)
    differences.set_yscale("log")
    differences.set_ylabel("difference of losses")
    if differences.get_legend_handles_labels()[0]:
        differences.legend()
    for axes in (losses, differences):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    bars = {"step_ms": "ms a step, median", "step_mib": "MiB of a step, beyond what stays"}
    for line, (field, label) in enumerate(bars.items()):
        values = {name: run[field] for name, run in runs.items() if run[field] is not None}
        if not values:  # there are no memory figures on a CPU
            continue
        axes = figure.add_subplot(grid[line, 1])
        places = range(len(values))
        axes.barh(places, list(values.values()), color=[of[name] for name in values])
        for place, value in zip(places, values.values(), strict=True):
            written = f"{value:.4g} " if value < 1000 else f"{value:,.0f} "
            axes.text(value, place, written, ha="right", va="center", color="white")
        axes.set_yticks(places, list(values))
        axes.invert_yaxis()
        axes.set_xlabel(label)
    s = result["settings"]
    where = result["machine"].get("gpu") or "CPU"
    figure.suptitle(
        f"GPT of {s['layers']} layers, {s['heads']} heads of {HEAD_DIM}, {s['batch']} x "
        f"{s['sequence']} bytes a step, {s['dtype']}, {where}"
        + (f", {s['processes']} processes" if s["processes"] > 1 else "")
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _table(runs: Mapping[str, Mapping]) -> str:
    rows = []
    for name, run in runs.items():
        memory = "-" if run["step_mib"] is None else f"{run['step_mib']:.0f}"
        last = statistics.fmean(run["losses"][-10:])
        rows.append([name, f"{run['step_ms']:.2f}", run["tokens_per_second"], memory])
        rows[-1] += [f"{run['losses'][0]:.4f}", f"{last:.4f}"]
    header = ["attention", "ms a step", "tokens/s", "MiB a step", "first loss", "mean of last 10"]
    return bm.format_table(header, rows)


def _check_text(check: Mapping) -> str:
    errors = ", ".join(f"{name} {x:.2e}" for name, x in check["largest_error"].items())
    return (
        f"gradients of step 1 against float64, largest error by norm: {errors}\n"
        f"flashcute's at most {check['worst_over_sdpa']:.2f} times PyTorch's (allowed "
        f"{MOST_ERROR:g}), at {check['worst_parameter']}: "
        f"{'passed' if check['passed'] else 'FAILED'}"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = "default: {} on a GPU, {} on a CPU"
    for name, what in {
        "steps": "of training",
        "layers": "of the model",
        "heads": f"of {HEAD_DIM} dimensions each",
        "sequence": "bytes of a sequence",
        "batch": "sequences of a step",
    }.items():
        sizes = usual.format(*(DEFAULTS[device][name] for device in ("cuda", "cpu")))
        parser.add_argument(f"--{name}", type=positive, help=f"{what}; {sizes}")
    parser.add_argument(
        "--attention", choices=("flashcute", "sdpa", "both"), default="both", help="default: both"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of products; default: bfloat16 on a GPU, else float32"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of weights and batches (0)")
    parser.add_argument(
        "--check", action="store_true", help="compare the first gradients with float64, too"
    )
    parser.add_argument(
        "--out", type=output_folder, help="folder for train_gpt.json and train_gpt.png"
    )
    parser.add_argument(
        "--nproc", type=positive, default=1, help="processes, which share each sequence (1)"
    )
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU that torch can use for --device cuda, found none")
    _check_processes(parser, args)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            f"expected the package matplotlib for --out, found none; {install_command('plot')}"
        )
    return args


def _check_processes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Sets ``args.nproc`` and rejects arguments that cannot be split over the processes."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    if launched > 1 and args.nproc not in (1, launched):
        parser.error(f"expected --nproc {launched} of torchrun, or none, got {args.nproc}")
    args.nproc = max(args.nproc, launched)
    if args.nproc == 1:
        return
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and args.nproc > gpus:
        parser.error(f"expected a GPU for each process, got --nproc {args.nproc} and {gpus} GPUs")
    if args.attention == "sdpa":
        parser.error("expected --nproc with an attention of flashcute, got --attention sdpa")
    for name, multiple in {"sequence": 2 * args.nproc, "batch": args.nproc}.items():
        size = getattr(args, name) or DEFAULTS[args.device][name]
        if size % multiple:
            parser.error(
                f"expected --{name} of a multiple of {multiple} for --nproc {args.nproc}, got "
                f"{size}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.nproc == 1:
        return _work(args)
    if "RANK" in os.environ:  # torchrun has started all processes
        _one_of_many(int(os.environ["LOCAL_RANK"]), args, "env://")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        try:
            mp.spawn(_one_of_many, (args, where), args.nproc)
        except mp.ProcessExitedException as error:
            if error.exit_code < 0:  # ended by a signal
                raise
            return error.exit_code  # the process has printed its message
    return 0


def _one_of_many(rank: int, args: argparse.Namespace, where: str) -> None:
    """Does the work of one process; exits with its status if that is not 0."""
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // args.nproc, 1))
    backend = "nccl" if args.device == "cuda" else "gloo"
    place = {} if where == "env://" else {"rank": rank, "world_size": args.nproc}
    dist.init_process_group(backend, init_method=where, **place)
    code = _work(args)
    dist.destroy_process_group()
    if code:
        sys.exit(code)


def _work(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        sys.exit(f"train_gpt.py: expected sizes that fit into memory, got: {reason}")


def _run(args: argparse.Namespace) -> int:
    sizes = {x: getattr(args, x) or usual for x, usual in DEFAULTS[args.device].items()}
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    settings = Settings(
        **sizes, seed=args.seed, device=args.device, dtype=dtype, processes=args.nproc
    )
    text = read_text()
    batches = settings.batches(text)
    digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()
    result: dict[str, object] = {
        "machine": bm.machine_info(),
        "settings": dataclasses.asdict(settings),
        "text": {"bytes": len(text), "sha256": digest},
    }
    several = args.nproc > 1
    names = [name for name, x in RUNS.items() if several or not (x.split or x.in_parts)]
    if args.attention != "both":
        names = [name for name in names if name == args.attention or RUNS[name].split]
    first = not dist.is_initialized() or dist.get_rank() == 0
    good = True
    if args.check:
        result["check"] = check = check_gradients(settings, names, batches[0])
        good &= check["passed"]
        if first:
            print(f"{_check_text(check)}\n")
    result["runs"] = runs = train(settings, names, batches)
    if not first:
        return 0
    if args.attention == "both":
        result["agreement"] = compare(runs)
        good &= result["agreement"]["passed"]
    if args.out:  # before printing: the reader of standard output may close the pipe
        bm.write_json(args.out / "train_gpt.json", result | {"passed": good})
        draw(result, args.out / "train_gpt.png")
    print(f"\n{_table(runs)}\n")
    if args.attention == "both":
        agreement = result["agreement"]
        apart = agreement["rms_difference_from_sdpa"]
        print(
            f"difference from PyTorch's loss over {settings.steps} steps: "
            + ", ".join(f"{name} {x:.2e}" for name, x in apart.items())
            + f" (allowed {MOST_NOISE:g} times the larger noise of PyTorch's own): "
            + ("passed" if agreement["passed"] else "FAILED")
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
