"""The operator: schema, fake, CPU implementation, tracing, and the binding that defines it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashcute
from flashcute import jit, ops
from flashcute.reference import attention_ref

ROOT = pathlib.Path(flashcute.__file__).parents[1]

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMA = (
    "flashcute::fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal)"
    " -> (Tensor out, Tensor softmax_lse)"
)


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def _layouts() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns q, k, v in every kind of memory layout that the operator takes."""
    k, v = _random(2, 11, 2, 16), _random(2, 11, 2, 16) + 1
    qkv = _random(2, 9, 3, 4, 16)
    return {
        "contiguous": (_random(2, 9, 4, 16), k, v),
        "heads_first": (_random(2, 4, 9, 16).transpose(1, 2), k, v),
        "seqlen_first": (_random(9, 2, 4, 16).transpose(0, 1), k, v),
        "gaps": (_random(2, 18, 4, 24)[:, ::2, :, :16], k, v),
        "packed": qkv.unbind(2),
        "expanded": (_random(1, 9, 4, 16).expand(2, -1, -1, -1), k[:1].expand(2, -1, -1, -1), v),
        "one_query": (_random(2, 1, 4, 16), k, v),
        "one_query_absurd_stride": (
            _random(2 * 64).as_strided((2, 1, 4, 16), (64, 3331333, 16, 1)),
            k,
            v,
        ),
        "no_query": (_random(2, 9, 4, 16)[:, :0], k, v),
        "no_key": (_random(2, 9, 4, 16), k[:, :0], v[:, :0]),
        "no_batch": (_random(0, 9, 4, 16), k[:0], v[:0]),
        "half": tuple(t.half() for t in qkv.unbind(2)),
        "bfloat16": tuple(t.bfloat16() for t in qkv.unbind(2)),
        "double": tuple(t.double() for t in qkv.unbind(2)),
    }


LAYOUTS = _layouts()
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def test_schema_is_the_frozen_one_or_compatible_with_it() -> None:
    frozen = torch._C.parse_schema(FROZEN_SCHEMA)
    schema = ops.load()._schema
    assert schema.is_backward_compatible_with(frozen)
    assert str(schema) == str(frozen), "compatible, but add the new schema to the frozen ones"
    assert schema.name == f"{ops.NAMESPACE}::fwd"
    assert not schema.is_mutable


@layouts
@pytest.mark.parametrize("causal", [False, True])
def test_cpu_implementation(layout: str, causal: bool) -> None:
    q, k, v = LAYOUTS[layout]
    out, lse = ops.fwd(q, k, v, 0.3, causal)
    upcast = torch.float64 if q.dtype == torch.float64 else torch.float32
    expected = attention_ref(q, k, v, softmax_scale=0.3, causal=causal, upcast=upcast)
    torch.testing.assert_close(out, expected.out.to(q.dtype))
    torch.testing.assert_close(lse, expected.lse.float())


@layouts
def test_fake_promises_what_the_cpu_implementation_returns(layout: str) -> None:
    args = (*LAYOUTS[layout], 0.25, True)
    real = ops.fwd(*args)
    with FakeTensorMode() as mode:
        fake = ops.fwd(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device)
        # Strides that are never used may differ, as torch itself gives fake tensors other ones.
        used = [dim for dim in range(r.dim()) if r.shape[dim] > 1 and r.numel() > 0]
        assert [r.stride(dim) for dim in used] == [f.stride(dim) for dim in used]
        assert r.storage_offset() == f.storage_offset() == 0


@layouts
def test_opcheck(layout: str) -> None:
    q, k, v = LAYOUTS[layout]
    results = torch.library.opcheck(ops.load(), (q, k, v, 0.25, True))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4


def test_a_gradient_through_the_operator_is_right_on_the_cpu() -> None:
    leaves = [t.clone().requires_grad_() for t in LAYOUTS["contiguous"]]
    out, lse = ops.load()(*leaves, 0.25, True)
    expected = attention_ref(*leaves, softmax_scale=0.25, causal=True)
    got = torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)
    expected = torch.autograd.grad(expected.out.square().sum() + expected.lse.sin().sum(), leaves)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


class _Projected(torch.nn.Module):
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(64, 64, device=device, dtype=dtype)

    def forward(self, x):
        q = self.projection(x)
        return ops.fwd(q, q, q, 0.125, True)[0]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own use
@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_module_trains(decomposed: bool) -> None:
    # The module is exported without gradients, then trained. The weights must still get gradients.
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float16)):
        x = torch.ones(2, 9, 4, 64, device=device, dtype=dtype)
        with torch.no_grad():
            program = torch.export.export(_Projected(device, dtype), (x,))
        assert f"{ops.NAMESPACE}.fwd.default" in [str(node.target) for node in program.graph.nodes]
        module = (program.run_decompositions() if decomposed else program).module()
        module(x).square().sum().backward()
        grad = module.projection.weight.grad
        assert grad.shape == (64, 64)
        assert grad.is_meta or grad.abs().sum() > 0


def test_the_operator_of_the_hot_path_has_no_python_between_call_and_kernel() -> None:
    ops.load()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"{ops.NAMESPACE}::fwd", "Autograd")
    assert not has_kernel(f"{ops.NAMESPACE}::fwd_no_grad", "Autograd")
    assert ops._fwd.name() == f"{ops.NAMESPACE}::fwd_no_grad"


def test_recorded_graphs_hold_the_operator_that_guards_gradients() -> None:
    ops.load()
    q = torch.empty(2, 9, 4, 64, device="meta", dtype=torch.half)
    graph = make_fx(lambda q: flashcute.flash_attn_func(q, q, q))(q)
    assert "flashcute.fwd.default" in graph.code


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, lse, _ = flashcute.flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True)
    return out + 1, lse


def _attend_by_the_operator(q, k, v) -> tuple[torch.Tensor, ...]:
    out, lse = ops.fwd(q * 2, k, v, 0.25, True)
    return out + 1, lse


def _backends() -> list[str]:
    # Without a C++ compiler there is nothing for inductor to test on the CPU.
    return ["aot_eager", "inductor"] if shutil.which("g++") else ["aot_eager"]


@pytest.mark.parametrize("backend", _backends())
def test_compile_fullgraph(backend: str) -> None:
    torch._dynamo.reset()
    attend = _attend_by_the_operator
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    for seqlen_k in (11, 14):
        q, k, v = _random(2, 9, 4, 16), _random(2, seqlen_k, 2, 16), _random(2, seqlen_k, 2, 16)
        with torch._dynamo.config.patch(error_on_recompile=seqlen_k != 11):
            result = compiled(q, k, v)
        for got, expected in zip(result, attend(q, k, v), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()


def test_compile_what_cuda_tensors_run_through() -> None:
    # On the meta device tracing takes the path of CUDA tensors, with their checks.
    torch._dynamo.reset()
    compiled = torch.compile(_attend, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seqlen_k, gap in ((11, 0), (14, 0), (14, 4)):
            q = torch.empty(2, 9, 4, 16, dtype=torch.float16, device="meta")
            k = torch.empty(2, seqlen_k, 2, 16 + gap, dtype=torch.float16, device="meta")[..., :16]
            with torch._dynamo.config.patch(error_on_recompile=(seqlen_k, gap) == (14, 0)):
                out, lse = compiled(q, k, k)
            assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
            assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_compile_before_the_binding_is_loaded() -> None:
    script = (
        "import torch, flashcute\n"
        "from flashcute import ops\n"
        "attend = torch.compile(flashcute.flash_attn_func, backend='eager', fullgraph=True)\n"
        "assert ops._fwd is None\n"
        "q = torch.empty(1, 3, 2, 8, dtype=torch.half, device='meta')\n"
        "assert attend(q, q, q).shape == q.shape\n"
        "assert ops._fwd is not None\n"
    )
    _run_python(script, ROOT)


def test_bad_input_raises_while_tracing() -> None:
    # Dynamo follows the checks: the caller of a compiled function sees the same error.
    torch._dynamo.reset()
    compiled = torch.compile(_attend, backend="eager")
    q = torch.empty(2, 9, 4, 64, device="meta", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"got k\.shape="):
        compiled(q, q[:1], q[:1])


@pytest.mark.parametrize("strict", [False, True])
def test_export_round_trip(strict: bool, tmp_path: pathlib.Path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return _attend_by_the_operator(q, k, v)

    q, k, v = LAYOUTS["contiguous"]
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {"q": None, "k": {1: seqlen}, "v": {1: seqlen}}
    with torch.no_grad():
        program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=shapes, strict=strict)
        torch.export.save(program, tmp_path / "attention.pt2")
        loaded = torch.export.load(tmp_path / "attention.pt2").module()
        targets = [str(node.target) for node in program.graph.nodes]
        assert f"{ops.NAMESPACE}.fwd.default" in targets
        k, v = _random(2, 33, 2, 16), _random(2, 33, 2, 16)
        results = zip(loaded(q, k, v), _attend_by_the_operator(q, k, v), strict=True)
        for got, expected in results:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_through_the_interface(device: str) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, device=device, dtype=torch.float16)
        out, lse, _ = flashcute.flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, device)
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 9), torch.float32, device)


def test_load_from_many_threads_registers_once() -> None:
    script = (
        "import threading\n"
        "from flashcute import ops\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(ops.load())) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "assert len(found) == 8 and len(set(map(id, found))) == 1, found\n"
    )
    _run_python(script, ROOT)


def test_a_fork_during_a_load_leaves_the_child_free_to_load() -> None:
    script = (
        "import os, signal, threading, time\n"
        "from flashcute import ops\n"
        "started = threading.Event()\n"
        "def load_binding():\n"
        "    if os.getpid() != parent:\n"
        "        os._exit(7)\n"
        "    started.set()\n"
        "    time.sleep(60)\n"
        "parent, ops.jit.load_binding = os.getpid(), load_binding\n"
        "threading.Thread(target=ops.load, daemon=True).start()\n"
        "started.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(30)\n"
        "    ops.load()\n"
        "status = os.waitpid(child, 0)[1]\n"
        "assert os.waitstatus_to_exitcode(status) == 7, status\n"
        "os._exit(0)\n"
    )
    _run_python(script, ROOT)


# Replaces the binding, and asks the resolver once more when the interpreter has ended.
_LATE_BINDING = """\
#include <cstdlib>
using Resolver = int (*)(const void *, void *, char *, int);
static Resolver resolver;
static void ask() {
    char error[64];
    if (resolver != nullptr) {
        resolver(nullptr, nullptr, error, sizeof(error));
    }
}
extern "C" __attribute__((visibility("default"))) void flashcute_set_resolver(Resolver to) {
    static const int once = std::atexit(ask);
    (void)once;
    resolver = to;
}
"""


def test_nothing_calls_the_resolver_when_the_interpreter_has_ended() -> None:
    unit = jit.build.Unit("late_binding", "host", _LATE_BINDING, ".cpp", ("-shared", "-fPIC"))
    late = jit.build.build(unit, jit.toolchain.find_host_compiler()).artefact.path
    script = (
        "import torch\n"
        "from flashcute import ops\n"
        "library = torch.library.Library('flashcute', 'DEF')\n"
        f"library.define({FROZEN_SCHEMA.removeprefix('flashcute::')!r})\n"
        "for name in ('fwd_no_grad', 'attend', 'attend_varlen', 'bwd', 'bwd_varlen'):\n"
        "    library.define(f'{name}(Tensor q) -> Tensor')\n"
        f"ops.jit.load_binding = lambda: {str(late)!r}\n"
        "ops.load()\n"
    )
    _run_python(script, ROOT)


class _Problem:
    """A problem as the binding hands it to the resolver."""

    def __init__(self, error_size: int) -> None:
        self.problem = ops._Problem(0, 1, 1, 2, 3, 4, 8, 2, 64)  # causal
        self.choice = ops._Choice()
        self.error = ctypes.create_string_buffer(b"x" * error_size, error_size)
        self.error_size = error_size

    def resolve(self) -> int:
        error = ctypes.addressof(self.error)
        problem, choice = ctypes.byref(self.problem), ctypes.byref(self.choice)
        return ops._resolve(problem, choice, error, self.error_size)


@pytest.mark.parametrize(("struct", "end"), [("Problem", "bool operator"), ("Choice", "};")])
def test_resolver_mirrors_the_bindings_structs(struct: str, end: str) -> None:
    # The binding asserts the size at compile time; the fields' order is read off its source.
    assert ctypes.sizeof(ops._Problem) == 76
    source = (ROOT / "csrc" / "flash_attn" / "src" / "kernel_table.h").read_text()
    body = re.search(rf"struct {struct} \{{(.*?){end}", source, re.DOTALL).group(1)
    fields = re.findall(r"\b(\w+)\s*[,;]", re.sub(r"//.*", "", body))
    assert fields == [name for name, _ in getattr(ops, f"_{struct}")._fields_]


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """The device properties of torch that the resolver reads."""

    major: int
    minor: int
    multi_processor_count: int = 132


def test_resolver_asks_heuristics_and_the_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    class Kernel:
        address = 4096

    def get_kernel(config, target):
        asked.update(config=config, target=target)
        return Kernel

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Gpu(9, 0))
    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    problem = _Problem(256)
    assert problem.resolve() == 0
    # Packed, three positions of four heads each need a tile for each of the two key heads, instead
    # of one for each of the eight query heads.
    assert (problem.choice.kernel, problem.choice.pack_heads) == (4096, 1)
    assert asked["target"] == "90"
    config = asked["config"]
    assert (config.dtype, config.mask, config.head_dim) == ("bf16", "causal", 64)
    assert not config.softcap and not config.alibi
    problem.problem.mask, problem.problem.window_left = 2, 5
    assert problem.resolve() == 0
    assert asked["config"].mask == "local"
    problem.problem.alibi = problem.problem.dropout = 1
    assert problem.resolve() == 0
    assert "_local_alibi_dropout_sm" in asked["config"].name


def test_resolver_refuses_unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Gpu(7, 5))
    problem = _Problem(256)
    assert problem.resolve() != 0
    assert b"NotImplementedError: " in problem.error.value
    assert b"(7, 5)" in problem.error.value


@pytest.mark.parametrize("error_size", [4, 37, 4096])
def test_resolver_never_writes_past_the_message_buffer(
    monkeypatch: pytest.MonkeyPatch, error_size: int
) -> None:
    def fail(problem):
        raise ValueError("\N{GREEK SMALL LETTER ALPHA}" * 4096)

    monkeypatch.setattr(ops, "_choose", fail)
    problem = _Problem(error_size)
    assert problem.resolve() != 0
    text = problem.error.value.decode()  # the text is cut between UTF-8 characters
    assert "ValueError: \N{GREEK SMALL LETTER ALPHA}".startswith(text[:13])
    assert error_size - 3 < len(problem.error.value) + 1 <= error_size


@pytest.mark.parametrize("error", [NotImplementedError("no"), KeyboardInterrupt()])
def test_caller_gets_the_resolvers_exception(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(problem):
        raise error

    def op(*args):
        problem = _Problem(256)
        assert problem.resolve() != 0
        raise RuntimeError(f"flashcute::fwd: {problem.error.value.decode()}")

    monkeypatch.setattr(ops, "_choose", fail)
    monkeypatch.setattr(ops, "_fwd", op)
    q = torch.empty(1)
    with pytest.raises(type(error)) as raised:
        ops.fwd(q, q, q, 1.0, False)
    assert raised.value is error

    # A stale exception of this thread is not mistaken for the cause of the next error.
    def other(*args):
        raise RuntimeError("another")

    monkeypatch.setattr(ops, "_fwd", other)
    with pytest.raises(RuntimeError, match="another"):
        ops.fwd(q, q, q, 1.0, False)


def test_exceptions_of_other_threads_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(4)
    q = torch.empty(1)
    seen: dict[int, BaseException] = {}

    def fail(problem):
        raise ValueError(threading.get_ident())

    def op(*args):
        problem = _Problem(256)
        problem.resolve()
        barrier.wait()
        raise RuntimeError(f"flashcute::fwd: {problem.error.value.decode()}")

    def call():
        try:
            ops.fwd(q, q, q, 1.0, False)
        except ValueError as error:
            seen[threading.get_ident()] = error

    monkeypatch.setattr(ops, "_choose", fail)
    monkeypatch.setattr(ops, "_fwd", op)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert all(error.args == (ident,) for ident, error in seen.items())


def test_cuda_operator_rejects_what_is_not_cuda() -> None:
    # The call reaches the operator's CUDA kernel through its dispatch key, as one with tensors on
    # several devices would.
    op = ops.load()
    q, k, v = (t.half() for t in LAYOUTS["contiguous"])
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"flashcute::fwd: expected q on cuda"):
        op.redispatch(keys, q, k, v, 0.25, False)
    with pytest.raises(RuntimeError, match=r"expected q of dtype float16 or bfloat16"):
        op.redispatch(keys, q.float(), k, v, 0.25, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "scale", "error", "message"),
    [
        (lambda q, k, v: (q[0], k, v), 0.5, ValueError, "got q.shape="),
        (lambda q, k, v: (q, k[:1], v), 0.5, ValueError, "q's batch size 2, got k.shape="),
        (lambda q, k, v: (q, k, v[:, :3]), 0.5, ValueError, "k's shape .*, got v.shape="),
        (lambda q, k, v: (q, k.bfloat16(), v), 0.5, TypeError, "got k.dtype=torch.bfloat16"),
        (lambda *x: tuple(t.int() for t in x), 0.5, TypeError, "got q.dtype=torch.int32"),
        (lambda *x: x, 1e39, ValueError, "got softmax_scale=1e"),
        (lambda *x: x, float("nan"), ValueError, "got softmax_scale=nan"),
        (lambda q, k, v: (q[:, :, :3], k, v), 0.5, ValueError, "positive multiple"),
    ],
)
def test_operator_makes_the_same_checks(device, change, scale, error, message) -> None:
    q = torch.zeros(2, 9, 4, 16, device=device, dtype=torch.float16)
    k = torch.zeros(2, 11, 2, 16, device=device, dtype=torch.float16)
    for fwd in (ops.fwd, ops.load()):
        with pytest.raises(error, match=rf"^flashcute::fwd: expected .*{message}.*; "):
            fwd(*change(q, k, k.clone()), scale, False)


def test_fake_of_the_operator_refuses_what_the_kernels_refuse() -> None:
    fwd = ops.load()
    for d, scale, error in ((20, 0.5, ValueError), (264, 0.5, NotImplementedError)):
        q = torch.zeros(2, 9, 4, d, device="meta", dtype=torch.float16)
        with pytest.raises(error, match=f"^flashcute::fwd: expected .*, got head_dim={d}; "):
            fwd(q, q, q, scale, False)
    q = torch.zeros(2, 9, 4, 64, device="meta", dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="got softmax_scale=-1"):
        fwd(q, q, q, -1.0, False)


def _symbols(*options: str) -> list[str]:
    run = subprocess.run(
        ["nm", "-D", *options, str(jit.load_binding())], capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")


@needs_nm
def test_binding_needs_only_torchs_c_shims() -> None:
    # One binary serves every torch and Python, so it uses no C++ of torch, no Python and no CUDA.
    names = [line.split()[-1].split("@")[0] for line in _symbols("--undefined-only")]
    assert len(names) > 20
    allowed = re.compile(r"aoti_torch_|torch_|_ZNK?[RO]?S|_ZS|_Z[TVnd]|__|_ITM|_Unwind|[a-z_]+$")
    assert [name for name in names if not allowed.match(name)] == []
    assert [n for n in names if re.match(r"_ZN?K?(3c10|2at|5torch)|_?Py|cuda|cu[A-Z]", n)] == []


@needs_nm
def test_binding_loads_without_cuda() -> None:
    weak = [line.split()[-1] for line in _symbols("--undefined-only") if " w " in line]
    assert "aoti_torch_get_current_cuda_stream" in weak


@needs_nm
def test_binding_exports_only_its_entries() -> None:
    exported = {line.split()[-1] for line in _symbols("--defined-only") if " T " in line}
    of_sdpa = {"flashcute_register_sdpa", "flashcute_unregister", "flashcute_explain"}
    assert exported == {"flashcute_set_resolver", "flashcute_remove_plan"} | of_sdpa


def test_package_can_be_relocated(tmp_path: pathlib.Path) -> None:
    # The copy has another name in another folder, one level down. This works as imports are
    # relative and the namespace is a constant.
    package = tmp_path / "vendored"
    ignore = shutil.ignore_patterns("__pycache__", "prebuilt", "instantiations")
    shutil.copytree(ROOT / "flashcute", package / "attention", ignore=ignore)
    shutil.copytree(ROOT / "csrc" / "flash_attn", package / "csrc" / "flash_attn", ignore=ignore)
    (package / "__init__.py").touch()
    script = (
        "import sys, torch, vendored.attention as attention\n"
        "from vendored.attention import ops\n"
        "q = torch.randn(2, 3, 2, 8)\n"
        "out, lse = ops.fwd(q, q, q, 0.5, False)\n"
        "assert torch.equal(out, attention.flash_attn_func(q, q, q, softmax_scale=0.5))\n"
        "assert 'flashcute' not in sys.modules\n"
    )
    _run_python(script, tmp_path)


def _run_python(script: str, path: pathlib.Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
