"""Code written for flash_attn, unmodified, on flashcute.

>>> flashcute.provide_flash_attn()
>>> import third_party_package  # which says: from flash_attn import flash_attn_func

An importer that comes before all others answers for the package ``flash_attn`` and its metadata, so
libraries that look for it by ``importlib.util.find_spec`` or ``importlib.metadata.version`` find
it. No file is written, and no package directory of flash_attn is owned.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from types import ModuleType

import torch

from ..checks import check_flag, check_kind
from . import raw

# The version of flash_attn whose interface this is, without a suffix: libraries compare it with the
# newest version that they take.
VERSION = "2.8.3"
_PACKAGE = "flash_attn"
_DISTRIBUTION = "flash-attn"

_FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_RAW = (
    "_flash_attn_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
)
_PADDING = (
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
)
# Each module's names, and the module of flashcute that has each of them.
_MODULES: dict[str, dict[str, str]] = {
    _PACKAGE: dict.fromkeys(_FUNCTIONS, "flashcute"),
    f"{_PACKAGE}.flash_attn_interface": {
        **dict.fromkeys(_FUNCTIONS, "flashcute"),
        **{name: f"{__name__}:{name}" for name in _RAW},
        **{f"_wrapped{name}": f"{__name__}:{name}" for name in _RAW},
    },
    f"{_PACKAGE}.bert_padding": dict.fromkeys(_PADDING, "flashcute.bert_padding"),
    f"{_PACKAGE}.layers": {},
    f"{_PACKAGE}.layers.rotary": {
        "apply_rotary_emb": "flashcute.rotary",
        "apply_rotary_emb_func": "flashcute.rotary:apply_rotary_emb",  # its older name
    },
}


def provide_flash_attn(*, shadow: bool = False) -> None:
    """Make ``import flash_attn``, in this process, import flashcute under that name.

    Call it before what imports flash_attn, or looks for it, is imported: libraries do both once,
    at their own import. There are ``flash_attn`` with its functions and ``__version__``,
    ``flash_attn.flash_attn_interface``, ``flash_attn.bert_padding``, ``flash_attn.layers.rotary``
    and the metadata of the distribution ``flash-attn``. Other modules of flash_attn (its layers,
    losses and fused operators) are not there: importing them is a ModuleNotFoundError. Arguments
    that flashcute does not take raise the errors of :func:`flashcute.flash_attn_func`.

    A second call does nothing.

    Args:
        shadow: Whether to come before a flash_attn that is installed or imported already. Code that
            has imported its names keeps them.

    Raises:
        RuntimeError: if another flash_attn is installed or imported, and ``shadow`` is not set.
    """
    shadow = check_flag("provide_flash_attn", "shadow", shadow)
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    found = _other_flash_attn()
    if found is not None and not shadow:
        raise RuntimeError(
            f"provide_flash_attn: expected no flash_attn, got one {found}; uninstall it, call this "
            "before it is imported, or pass shadow=True to come before it in this process"
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    importlib.invalidate_caches()


def _other_flash_attn() -> str | None:
    """Says in words where another flash_attn is; None if there is none."""
    if _PACKAGE in sys.modules:
        module = sys.modules[_PACKAGE]
        return f"imported from {getattr(module, '__file__', None) or 'a namespace package'}"
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None:
        return f"installed in {spec.origin or [*(spec.submodule_search_locations or ())]}"
    try:
        return f"of version {importlib.metadata.version(_DISTRIBUTION)} in the installed packages"
    except importlib.metadata.PackageNotFoundError:
        return None


_ANY = importlib.metadata.DistributionFinder.Context()  # of any name


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads flash_attn's modules, and finds its metadata."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in _MODULES)
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=f"flashcute ({__file__})", is_package=is_package
        )

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        homes = _MODULES[module.__name__]

        def find(name: str) -> object:
            if name not in homes:
                raise AttributeError(
                    f"module {module.__name__!r}, which flashcute provides, has no attribute "
                    f"{name!r}"
                )
            value = _lookup(homes[name], name)
            setattr(module, name, value)
            return value

        module.__file__ = __file__
        module.__doc__ = f"flashcute under the name {module.__name__}."
        module.__getattr__ = find
        module.__all__ = list(homes)
        module.__dir__ = lambda: sorted({*vars(module), *module.__all__})
        if module.__name__ == _PACKAGE:
            module.__version__ = VERSION

    def find_distributions(self, context=_ANY):
        name = context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == _DISTRIBUTION:
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {VERSION}\n"
            "Summary: provided by flashcute\n",
            "top_level.txt": f"{_PACKAGE}\n",
        }.get(filename)

    def locate_file(self, path):
        return importlib.metadata.distribution("flashcute").locate_file(path)


def _lookup(home: str, name: str) -> object:
    """Returns ``name`` of a module of flashcute (``module:other`` for another name)."""
    module, _, other = home.partition(":")
    return getattr(importlib.import_module(module), other or name)


def _check_dropout(fn: str, dropout_p: float) -> None:
    if dropout_p:
        # A backward that is called by itself would have to repeat the forward's random draw.
        raise NotImplementedError(
            f"{fn}: expected no dropout, whose mask its backward cannot repeat, got "
            f"dropout_p={dropout_p}; call flash_attn_func, which has dropout and its gradient"
        )


def _rng_state(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros((2,), dtype=torch.int64, device=q.device)


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    """Computes flash_attn 2.8's forward without autograd.

    Returns (out, softmax_lse, S_dmask, rng_state).
    """
    _check_dropout("_flash_attn_forward", dropout_p)
    window = window_size_left, window_size_right
    out, lse = raw.forward(q, k, v, causal, softmax_scale, window, alibi_slopes, softcap)
    return out, lse, q.new_empty(0), _rng_state(q)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    """Computes flash_attn 2.8's backward into dq, dk and dv.

    It returns None where flash_attn returns rowsum(dout * out).
    """
    fn = "_flash_attn_backward"
    _check_dropout(fn, dropout_p)
    targets = {"dq": dq, "dk": dk, "dv": dv}
    _check_targets(fn, targets)
    window = window_size_left, window_size_right
    grads = raw.backward(
        dout, q, k, v, out, softmax_lse, causal, softmax_scale, window, deterministic,
        alibi_slopes, softcap,
    )  # fmt: skip
    _copy_to(fn, targets, grads)


def _check_targets(fn: str, targets: dict) -> None:
    for name, target in targets.items():
        if target is not None:
            check_kind(fn, name, target)


def _copy_to(fn: str, targets: dict, grads) -> None:
    pairs = [(x, g) for x, g in zip(targets.items(), grads, strict=True) if x[1] is not None]
    for (name, target), grad in pairs:
        if target.shape != grad.shape:
            raise ValueError(
                f"{fn}: expected {name} of shape {tuple(grad.shape)}, got {name}.shape="
                f"{tuple(target.shape)}; pass torch.empty_like({name[1:]})"
            )
    for (_, target), grad in pairs:
        target.copy_(grad)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    """Computes flash_attn 2.8's ragged forward: (out, softmax_lse, S_dmask, rng_state)."""
    fn = "_flash_attn_varlen_forward"
    _check_dropout(fn, dropout_p)
    for name, value in (("block_table", block_table), ("leftpad_k", leftpad_k)):
        if value is not None:
            raise NotImplementedError(f"{fn}: expected {name}=None, got a tensor; gather the keys")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    out, lse = raw.forward_varlen(
        q, k, v, lengths, causal, softmax_scale, window, alibi_slopes, softcap, seqused_k
    )
    return out, lse, q.new_empty(0), _rng_state(q)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    """Computes flash_attn 2.8's backward of ragged batches, as :func:`_flash_attn_backward`."""
    fn = "_flash_attn_varlen_backward"
    _check_dropout(fn, dropout_p)
    targets = {"dq": dq, "dk": dk, "dv": dv}
    _check_targets(fn, targets)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = window_size_left, window_size_right
    grads = raw.backward_varlen(
        dout, q, k, v, out, softmax_lse, lengths, causal, softmax_scale, window, deterministic,
        alibi_slopes, softcap,
    )  # fmt: skip
    _copy_to(fn, targets, grads)
