"""A program that calls SDPA's operators as if on CUDA, by the binding of ``host_binding.cpp``.

It prints what is wrong with them, one line each, and the number of these lines.
"""

from __future__ import annotations

import torch

import host_binding  # first: it decides which operators flashcute registers  # isort: skip

from flashcute import ops
from flashcute.integrations import raw, sdpa

aten = torch.ops.aten


def calls():
    """Yields (whether the kernels take the call as it is; query, key and value; the options)."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    first = zeros(2, 4, 20, 64), zeros(2, 2, 30, 64), zeros(2, 2, 30, 64)
    inside = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in first)
    odd_start = zeros(2 * 4 * 20 * 64 + 8)[1:-7].view(2, 4, 20, 64)
    for taken, qkv in (
        (True, first),
        (True, inside),
        (True, (first[0], *inside[1:])),
        (True, (first[0][:, :, :0], *first[1:])),
        (True, tuple(x[:0] for x in first)),
        (True, (zeros(1, 1, 1, 64).expand(2, 4, 20, 64), *first[1:])),
        (True, tuple(x.bfloat16() for x in first)),
        (True, (odd_start, *first[1:])),
        (False, (zeros(2, 4, 20, 68)[..., :64], *first[1:])),
        (False, (first[0].mT.contiguous().mT, *first[1:])),
        (False, tuple(x[..., :20] for x in first)),
        (False, tuple(x.float() for x in first)),
    ):
        for options in ((0.0, False, None), (0.0, True, 0.25)):
            yield taken, qkv, options
    for options in ((0.5, False, None), (0.0, False, -1.0)):
        yield False, first, options


class Call:
    """A call of SDPA's forward, or of its backward.

    ``name`` is "forward", or a backward's name. That of "backward of a sum" has an expanded
    gradient of the output, as sum() makes it; that of any other is contiguous like the output.
    """

    def __init__(self, name, taken, qkv, options):
        self.name, self.options, self.dropout_p = name, options, options[0]
        self.taken = taken and name != "backward of a sum"
        self.tensors = dict(zip(("q", "k", "v"), qkv, strict=True))
        if name != "forward":
            out = torch.empty_like(qkv[0])
            dout = torch.zeros(64, dtype=out.dtype).sum().expand_as(out)
            self.tensors["do"] = dout if name == "backward of a sum" else torch.zeros_like(out)
            self.tensors |= {"o": out, "softmax_lse": torch.zeros(out.shape[:3])}

    def __call__(self):
        *qkv, dropout_p, is_causal, scale = *self.tensors.values(), *self.options
        if self.name == "forward":
            return aten._scaled_dot_product_flash_attention(*qkv, dropout_p, is_causal, scale=scale)
        *qkv, dout, out, lse = qkv
        unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return aten._scaled_dot_product_flash_attention_backward(
            *(dout, *qkv, out, lse, None, None, 20, 30, dropout_p, is_causal, *unused),
            scale=scale,
        )

    def __str__(self):
        kinds = [(list(x.shape), x.stride(), x.dtype) for x in self.tensors.values()]
        return f"{self.name} of {kinds}, {self.options}"


class Runs:
    """Makes calls and records the kernels asked for, the launches and the calls of Python."""

    def __init__(self, library):
        self.library, self.problems, self.entered = library, [], 0
        choose = ops._choose

        def remember(problem):
            self.problems.append({name: getattr(problem, name) for name, _ in problem._fields_})
            return choose(problem)

        ops._choose = remember
        for name in ("forward", "backward"):
            setattr(raw, name, self.counted(getattr(raw, name)))

    def counted(self, function):
        def call(*args):
            self.entered += 1
            return function(*args)

        return call

    def __call__(self, call: Call) -> dict:
        """Returns shapes and strides of the results and the launch's parameters, or the error."""
        ops._keep_alive[0].flashcute_set_resolver(ops._resolve)  # forgets the kernels it knows
        self.problems.clear()
        self.entered = 0
        try:
            results = call()
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0].rpartition("Error: ")[2]}
        kinds = [
            (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in results
        ]
        if not self.problems:
            return {"results": kinds}
        (problem,) = self.problems
        params = host_binding.launched(self.library, problem["backward"] > 0)
        # The name of the tensor at a pointer replaces it. A copy of a tensor is "new".
        names = {x.data_ptr(): name for name, x in call.tensors.items()}
        names |= dict.fromkeys((0, None))
        params |= {n: names.get(x, "new") for n, x in params.items() if n.endswith("_ptr")}
        if call.tensors["q"].stride(0) == 0:
            # Python's kernels write results in another layout and copy them to the one that torch
            # promises, which the binding's kernels write at once.
            params = {n: x for n, x in params.items() if not n.startswith(("o_", "dq_"))}
        return {"results": kinds} | problem | params


def differences(library) -> list[str]:
    """Returns how calls by Python's kernels alone differ from calls through the binding's."""
    runs, found = Runs(library), []
    cases = [Call(name, *args) for args in calls() for name in ("forward", "backward")]
    cases.append(Call("backward of a sum", *next(calls())))
    handle = sdpa._Handle("CPU")
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        for call in cases:
            by_python, entered = runs(call), [runs.entered]
            handle._bypass_python("CPU")
            by_binding = runs(call)
            entered.append(runs.entered)
            handle._undo.close()
            wrong = [
                f"{name}={by_binding.get(name)} and not {by_python.get(name)}"
                for name in by_python | by_binding
                if by_python.get(name) != by_binding.get(name)
            ]
            python = int(call.dropout_p == 0)
            if entered != [python, 0 if call.taken else python]:
                wrong.append(f"Python was entered {entered} times")
            found += [f"{', '.join(wrong)}: {call}"] if wrong else []
    handle.remove()
    return found


def main() -> None:
    found = differences(host_binding.load())
    print(*found[:20], f"{len(found)} are wrong", sep="\n")


if __name__ == "__main__":
    main()
