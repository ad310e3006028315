"""A Llama generating over flashcute's paged cache, and with transformers and PyTorch's SDPA.

python examples/generate.py --check    # an 8B model's sizes on a GPU, a tiny one on a CPU

Prompts of different lengths are continued by the likeliest token each time. On a GPU a decoding
step over the paged cache is one CUDA graph. transformers' own `generate` does the same from the
same weights: over its DynamicCache, step by step from Python, and on a GPU also over its
StaticCache, for which it compiles a step with torch.compile, also into a CUDA graph. transformers
pads its prompts to the longest; the paged cache is filled with one prompt after the other. Each
contender runs once before it is timed.

--check computes all logits again in float32 (float64 for float32) for the tokens that were chosen.
The error of flashcute's logits may be at most twice that of PyTorch's (root mean square). A token
may differ from the exact one only in a tie: where their exact logits differ by at most twice
PyTorch's largest error, because two such errors can exchange them. Exits with 1 when either
condition does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

# Set before transformers is imported, which reads it once; without it transformers looks for newer
# files online.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from paged_llama import PagedCache, PagedLlama
from tqdm import tqdm

import flashcute
from flashcute import benchmarking as bm
from flashcute.arguments import is_out_of_memory, natural, output_file, positive
from flashcute.extras import install_command
from flashcute.features import VECTOR

MOST_ERROR = 2.0  # allowed multiple of PyTorch's error, as in flashcute/testing.py
# Default arguments by device. The model on a GPU is as large as Llama 3 8B
# (https://arxiv.org/abs/2407.21783, table 3).
MODEL = {
    "cuda": {"layers": 32, "hidden": 4096, "intermediate": 14336, "vocabulary": 128256}
    | {"heads": 32, "heads_k": 8, "head_dim": 128},
    "cpu": {"layers": 2, "hidden": 64, "intermediate": 128, "vocabulary": 1000}
    | {"heads": 4, "heads_k": 2, "head_dim": 16},
}
WORK = {
    "cuda": {"batch": 16, "prompts": [512, 4096], "new_tokens": 128, "page_size": 64},
    "cpu": {"batch": 4, "prompts": [5, 40], "new_tokens": 16, "page_size": 16},
}
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.float16, torch.bfloat16)}
CACHES = {"dynamic": "DynamicCache", "static": "StaticCache"}  # names of transformers' classes
# Fields of the model's configuration that a result contains.
MODEL_FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# Kinds of rotary tables that change with the length of a sequence.
CHANGING_TABLES = ("dynamic", "longrope")

# A run generates for all prompts. It calls its argument whenever one more token of each sequence
# has been enqueued, and returns tokens (b, n) and logits (n, b, vocabulary).
Run = Callable[[Callable[[], None]], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass
class Settings:
    """What is generated: the batch, the dtype, the device, and the caches that SDPA uses."""

    batch: int
    prompts: list[int]  # lengths of the shortest and the longest prompt
    new_tokens: int
    page_size: int
    seed: int
    device: str
    dtype: str
    sdpa: list[str]

    def lengths(self) -> list[int]:
        """Returns the length of each prompt, evenly spaced from the shortest to the longest."""
        least, most = self.prompts
        return [least + (most - least) * i // max(1, self.batch - 1) for i in range(self.batch)]

    def texts(self, vocabulary: int) -> list[torch.Tensor]:
        """Returns random prompts, int64."""
        generator = torch.Generator().manual_seed(self.seed)
        texts = [torch.randint(vocabulary, (n,), generator=generator) for n in self.lengths()]
        return [text.to(self.device) for text in texts]


class Clock:
    """A clock that notes when the device reaches each mark of a run, without waiting in between."""

    def __init__(self, device: str, bar: tqdm) -> None:
        self.on_gpu, self.bar, self.marks = device == "cuda", bar, []
        if self.on_gpu:
            torch.cuda.synchronize()
        self._note()

    def _note(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def mark(self) -> None:
        self._note()
        self.bar.update()

    def seconds(self) -> list[float]:
        """Returns the seconds from each mark to the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.on_gpu:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


@dataclasses.dataclass
class Generated:
    """The output of a run: tokens, logits and times."""

    tokens: torch.Tensor  # (b, new_tokens)
    logits: torch.Tensor  # (new_tokens, b, vocabulary)
    seconds: list[float]  # first the prompts with their first token, then each further step

    def figures(self, batch: int) -> dict[str, float]:
        step = statistics.median(self.seconds[1:])
        return {
            "prompts_s": self.seconds[0],
            "step_ms": 1e3 * step,
            "tokens_per_second": batch / step,
        }


def _read(kind, folder: pathlib.Path, **options):
    """Loads a transformers object of class ``kind`` from a folder."""
    # transformers would take the name for a repository online.
    if not (folder / "config.json").is_file():
        sys.exit(f"generate.py: expected --model to be a folder with config.json, got {folder}")
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"generate.py: expected --model that transformers can read, got: {reason}")


def model_config(folder: pathlib.Path | None, sizes: Mapping[str, int], room: int):
    """Returns the folder's configuration, or one of these sizes for ``room`` tokens a sequence."""
    from transformers import AutoConfig, LlamaConfig

    if folder is None:
        return LlamaConfig(
            num_hidden_layers=sizes["layers"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["intermediate"],
            vocab_size=sizes["vocabulary"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["heads_k"],
            head_dim=sizes["head_dim"],
            max_position_embeddings=room,
            # Scores and activations of any hidden size have the spread that 0.02 gives at 4096.
            initializer_range=min(1.0, 0.02 * (4096 / sizes["hidden"]) ** 0.5),
        )
    config = _read(AutoConfig, folder)
    if config.model_type != "llama":
        sys.exit(
            f"generate.py: expected --model of the Llama architecture, got {config.model_type!r} "
            f"in {folder}; name another folder, or none for random weights"
        )
    kind = config.rope_parameters["rope_type"]
    if kind in CHANGING_TABLES:
        sys.exit(
            "generate.py: expected --model with rotary tables that are the same for all lengths, "
            f"got rope_type {kind!r} in {folder}; name another folder"
        )
    if room > config.max_position_embeddings:
        sys.exit(
            f"generate.py: expected --prompts and --new-tokens of at most "
            f"{config.max_position_embeddings} tokens together, as --model has no more places, "
            f"got {room}; ask for less"
        )
    return config


def load_model(config, folder: pathlib.Path | None, dtype: torch.dtype, device: str, seed: int):
    """Loads the folder's weights, or draws random ones; attention is PyTorch's SDPA."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if folder is None:
        gpus = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = _read(AutoModelForCausalLM, folder, **options)
    # A folder's own settings may ask for sampling or for penalties on repetitions.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(device).eval()


def generate_paged(model, prompts: Sequence[torch.Tensor], settings: Settings) -> Run:
    """Returns a function that generates over a paged cache; one graph serves all of its calls."""
    room = [len(prompt) + settings.new_tokens for prompt in prompts]
    cache = PagedCache(model, room, settings.page_size, settings.seed)
    paged = PagedLlama(model, cache, graph=settings.device == "cuda")
    return lambda mark: paged.generate(prompts, settings.new_tokens, mark)


def generate_sdpa(model, prompts: Sequence[torch.Tensor], settings: Settings, cache: str) -> Run:
    """Returns a function that generates with transformers over its own cache."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=settings.device)
    mask = torch.zeros_like(tokens)
    for row, used, prompt in zip(tokens, mask, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
        used[longest - len(prompt) :] = 1

    def generate(mark: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        def note(_tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            mark()
            return scores

        made = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=settings.new_tokens,
            do_sample=False,
            cache_implementation=cache,
            logits_processor=[note],
            return_dict_in_generate=True,
            output_logits=True,
        )
        return made.sequences[:, longest:], torch.stack(made.logits)

    return generate


def generate_all(model, prompts: Sequence[torch.Tensor], settings: Settings) -> dict:
    """Generates with each contender; returns each run's :class:`Generated` by name."""
    runs = {"flashcute": generate_paged(model, prompts, settings)}
    for cache in settings.sdpa:
        runs[f"sdpa {cache}"] = generate_sdpa(model, prompts, settings, cache)
    made = {}
    steps = 2 * len(runs) * settings.new_tokens
    with tqdm(total=steps, desc="generating", unit="step", dynamic_ncols=True) as bar:
        for name, run in runs.items():
            bar.set_postfix_str(f"{name}: first run")
            run(Clock(settings.device, bar).mark)
            bar.set_postfix_str(name)
            clock = Clock(settings.device, bar)
            tokens, logits = run(clock.mark)
            made[name] = Generated(tokens, logits, clock.seconds())
    return made


@dataclasses.dataclass
class Judged:
    """A run compared with the exact logits of its own tokens: an entry for each sequence."""

    exact: list[torch.Tensor]  # whether each token is the exact one, (new_tokens)
    worse: list[torch.Tensor]  # how far its exact logit is below the largest, (new_tokens)
    margin: list[torch.Tensor]  # how far the largest exact logit is above the second, (new_tokens)
    largest_error: float
    rms_error: float


@torch.no_grad()
def judge(reference, prompts: Sequence[torch.Tensor], run: Generated, bar: tqdm) -> Judged:
    """Recomputes the logits of each sequence with ``reference``, without padding and cache."""
    exact, worse, margin, largest, squares = [], [], [], [], []
    for i, (prompt, tokens) in enumerate(zip(prompts, run.tokens, strict=True)):
        whole = torch.cat((prompt, tokens[:-1]))[None]
        n = len(tokens)
        logits = reference(input_ids=whole, use_cache=False, logits_to_keep=n).logits[0]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        best, places = logits.topk(2)
        exact.append(tokens == places[:, 0])
        worse.append(best[:, 0] - chosen)
        margin.append(best[:, 0] - best[:, 1])
        error = run.logits[:, i].to(logits.dtype) - logits
        largest.append(error.abs().max().item())
        squares.append(error.square().mean().item())
        bar.update()
    largest_error = torch.tensor(largest).max().item()  # NaN if any is NaN
    return Judged(exact, worse, margin, largest_error, statistics.fmean(squares) ** 0.5)


def compare(judged: Mapping[str, Judged], runs: Mapping[str, Generated]) -> dict[str, object]:
    """Checks whether flashcute's tokens and logits are as near to the exact ones as PyTorch's."""
    peers = [run for name, run in judged.items() if name != "flashcute"]
    tolerance = 2 * max(run.largest_error for run in peers)
    over = judged["flashcute"].rms_error / max(run.rms_error for run in peers)
    counts = {}
    for name, run in judged.items():
        exact, worse = torch.cat(run.exact), torch.cat(run.worse)
        wrong = ~exact & ~(worse <= tolerance)  # also where ``worse`` is NaN
        counts[name] = {
            "exact": int(exact.sum()),
            "ties": int((~exact & ~wrong).sum()),
            "wrong": int(wrong.sum()),
            "decided": int((torch.cat(run.margin) > tolerance).sum()),
            "rms_error": run.rms_error,
            "largest_error": run.largest_error,
            "as_flashcute": same_tokens(runs["flashcute"].tokens, runs[name].tokens),
        }
    passed = counts["flashcute"]["wrong"] == 0 and over <= MOST_ERROR  # False for NaN
    return {
        "tokens": runs["flashcute"].tokens.numel(),
        "runs": counts,
        "tolerance": tolerance,
        "rms_error_over_sdpa": over,
        "passed": passed,
    }


def same_tokens(one: torch.Tensor, other: torch.Tensor) -> int:
    """Counts the tokens that agree before each sequence's first difference."""
    return int((one == other).int().cumprod(1).sum())


def _table(result: Mapping) -> str:
    """Formats a table with a row for each run."""
    header = ["attention", "cache", "prompts, s", "ms a step", "tokens/s"]
    checked = result.get("check")
    rows = []
    if checked:
        header += ["exact tokens", "ties", "wrong", "rms error"]
    on_gpu = result["settings"]["device"] == "cuda"
    for name, run in result["runs"].items():
        attention, _, cache = name.partition(" ")
        if cache:
            cache = CACHES[cache] + (", compiled" if on_gpu and cache == "static" else "")
        else:
            pages = f"pages of {result['settings']['page_size']}"
            cache = f"{pages}, CUDA graph" if on_gpu else pages
        speed = (
            f"{run['prompts_s']:.3f}",
            f"{run['step_ms']:.2f}",
            f"{run['tokens_per_second']:.0f}",
        )
        rows.append([attention, cache, *speed])
        if checked:
            counts = checked["runs"][name]
            rows[-1] += [counts["exact"], counts["ties"], counts["wrong"]]
            rows[-1].append(f"{counts['rms_error']:.2e}")
    return bm.format_table(header, rows)


def _report(result: Mapping) -> str:
    """Describes in words what the check found."""
    check = result["check"]
    counts, tokens = check["runs"]["flashcute"], check["tokens"]
    same = ", ".join(
        f"{run['as_flashcute']} as {name}" for name, run in check["runs"].items() if " " in name
    )
    return (
        f"of flashcute's {tokens} tokens {counts['exact']} are those of the {check['reference']} "
        f"reference, {counts['ties']} are ties (worse by at most {check['tolerance']:.2g}), "
        f"{counts['wrong']} wrong; in {counts['decided']} places no tie is possible\n"
        f"the same before a sequence's first difference: {same}\n"
        f"flashcute's error of logits is {check['rms_error_over_sdpa']:.2f} times PyTorch's "
        f"(allowed {MOST_ERROR:g}): {'passed' if check['passed'] else 'FAILED'}"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = "default: {} on a GPU, {} on a CPU"
    model = parser.add_argument_group("the model: a folder, or sizes for random weights")
    model.add_argument("--model", type=pathlib.Path, help="folder of a Llama for transformers")
    for name, what in {
        "layers": "of the model",
        "hidden": "size of its states",
        "intermediate": "size inside its perceptrons",
        "vocabulary": "tokens that there are",
        "heads": "of queries",
        "heads_k": "of keys and values",
        "head_dim": "dimensions of each",
    }.items():
        sizes = usual.format(*(MODEL[device][name] for device in ("cuda", "cpu")))
        flag = f"--{name.replace('_', '-')}"
        model.add_argument(flag, type=positive, help=f"{what}; {sizes}")
    for name, what in {
        "batch": "sequences",
        "new_tokens": "of each sequence, at least 2",
        "page_size": "tokens of a page, from 1 on",
    }.items():
        sizes = usual.format(*(WORK[device][name] for device in ("cuda", "cpu")))
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"{what}; {sizes}")
    sizes = usual.format(*("{} {}".format(*WORK[x]["prompts"]) for x in ("cuda", "cpu")))
    parser.add_argument(
        "--prompts", type=positive, nargs=2, metavar=("LEAST", "MOST"),
        help=f"tokens of the shortest and the longest prompt, the others between; {sizes}",
    )  # fmt: skip
    parser.add_argument(
        "--sdpa", choices=CACHES, nargs="+",
        help="transformers' caches to compare with; default: both on a GPU, dynamic on a CPU",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of weights and prompts (0)")
    parser.add_argument(
        "--check", action="store_true", help="compare tokens and logits with exact ones, too"
    )
    parser.add_argument("--json", type=output_file, help="file for the result")
    return _completed(parser, parser.parse_args(argv))


def _completed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Fills in the device's defaults and rejects arguments that do not go together."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU that torch can use for --device cuda, found none")
    if importlib.util.find_spec("transformers") is None:
        parser.error(f"expected the package transformers, found none; {install_command('model')}")
    given = [name for name in MODEL["cpu"] if getattr(args, name) is not None]
    if args.model and given:
        parser.error(
            f"expected --model without --{given[0].replace('_', '-')}, got both; the folder says "
            "how large its model is"
        )
    for name, default in (MODEL[args.device] | WORK[args.device]).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.sdpa = list(dict.fromkeys(args.sdpa or (CACHES if args.device == "cuda" else ["dynamic"])))
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.prompts[0] > args.prompts[1]:
        parser.error(
            f"expected --prompts LEAST MOST in this order, got {args.prompts[0]} "
            f"{args.prompts[1]}; swap them"
        )
    if args.new_tokens < 2:
        parser.error(
            f"expected --new-tokens of at least 2, got {args.new_tokens}; the first comes with "
            "the prompt, and the others are timed"
        )
    if args.hidden % args.heads:  # transformers asks for this, whatever head_dim is
        parser.error(
            f"expected --hidden to be a multiple of --heads, got {args.hidden} and {args.heads}; "
            "choose others"
        )
    if args.heads % args.heads_k:
        parser.error(
            f"expected --heads to be a multiple of --heads-k, got {args.heads} and "
            f"{args.heads_k}; choose others"
        )
    if args.device == "cuda" and args.dtype == "float32":
        parser.error(
            "expected --dtype float16 or bfloat16 on a GPU, got float32; or add --device cpu"
        )
    if args.head_dim % 2:
        parser.error(
            "expected --head-dim to be even, as rotary embedding turns pairs, got "
            f"{args.head_dim}; choose another"
        )
    return args


def _check_support(config, settings: Settings) -> None:
    on_gpu = settings.device == "cuda"
    answer = flashcute.supports(
        device=settings.device,
        dtype=DTYPES[settings.dtype],
        head_dim=config.head_dim,
        num_heads=config.num_attention_heads,
        num_heads_k=config.num_key_value_heads,
        causal=True,
        k_cache=True,
        block_table=True,
        capability=torch.cuda.get_device_capability() if on_gpu else None,
    )
    reasons = list(answer.reasons)
    if on_gpu and config.head_dim % VECTOR:
        reasons.append(
            f"expected a head_dim that is a multiple of {VECTOR} to append to a cache on CUDA, got "
            f"head_dim={config.head_dim}; choose another, or --device cpu"
        )
    if reasons:
        sys.exit(f"generate.py: {'; '.join(reasons)}")


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        return _run(args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        sys.exit(f"generate.py: expected sizes that fit into memory, got: {reason}")


def _run(args: argparse.Namespace) -> int:
    import transformers

    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    sizes = {name: getattr(args, name) for name in MODEL["cpu"]}
    config = model_config(args.model, sizes, settings.prompts[1] + settings.new_tokens)
    _check_support(config, settings)
    dtype = DTYPES[settings.dtype]
    model = load_model(config, args.model, dtype, settings.device, settings.seed)
    prompts = settings.texts(config.vocab_size)
    runs = generate_all(model, prompts, settings)
    result: dict[str, object] = {
        "machine": bm.machine_info() | {"transformers": transformers.__version__},
        "settings": dataclasses.asdict(settings),
        "model": {name: getattr(config, name) for name in MODEL_FIELDS},
        "runs": {name: run.figures(settings.batch) for name, run in runs.items()},
    }
    good = True
    if args.check:
        exact = torch.float64 if dtype == torch.float32 else torch.float32
        reference = load_model(config, None, exact, settings.device, settings.seed)
        reference.load_state_dict(model.state_dict())
        total = len(runs) * settings.batch
        with tqdm(total=total, desc="checking", unit="sequence", dynamic_ncols=True) as bar:
            judged = {name: judge(reference, prompts, run, bar) for name, run in runs.items()}
        name = str(exact).removeprefix("torch.")
        result["check"] = compare(judged, runs) | {"reference": name}
        good = result["check"]["passed"]
    if args.json:  # before printing: the reader of standard output may close the pipe
        bm.write_json(args.json, result | {"passed": good})
    least, most = settings.prompts
    print(
        f"{config.num_hidden_layers} layers, {config.num_attention_heads}/"
        f"{config.num_key_value_heads} heads of {config.head_dim}, {settings.dtype}; "
        f"{settings.batch} prompts of {least} to {most} tokens, {settings.new_tokens} new ones "
        f"each; median step\n\n{_table(result)}\n"
    )
    if args.check:
        print(_report(result))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
