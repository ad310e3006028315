"""flashcute as an attention implementation of Hugging Face transformers (5.x).

>>> from flashcute.integrations.transformers import register
>>> register()
>>> model = AutoModel.from_pretrained(folder, attn_implementation="cute_attn")

transformers hands attention two things that must agree: a mask, made once per forward by a mask
function, and the call itself, made once per layer. Both are registered under one name: without a
mask function of that name transformers drops the mask silently, and padding is attended to.

The mask function returns None, a mask that the kernels can express, or a dense one. The kernels
express full and causal attention, also of a chunk of new tokens after a cache; sliding windows;
padding, which is not read where it is before or behind a row's tokens, and where it is between them
is taken out before the call and put back after it; packed sequences; and a static cache whose end
is still empty. Anything else (several chunks, prefixes, a bias) and all
masks that compiled models make are dense, which the CPU reference applies exactly. On CUDA they are
refused by name, or go to PyTorch, as :func:`register` was told.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    from .transformers_masks import (
        KernelMask,
        Plan,
        bounds_of_token,
        mask_of_bounds,
        plan,
        recognise,
    )
except ImportError as error:
    raise ImportError(
        f"flashcute.integrations.transformers: expected transformers 5.17 or later, got: {error}; "
        "`pip install 'transformers>=5.17'`",
        name=error.name,
    ) from error

from ..bert_padding import index_first_axis, index_put_first_axis
from ..checks import check_dropout
from ..cpu_ops import attend
from ..flash_attn_interface import flash_attn_func
from ..flash_attn_kvcache import flash_attn_with_kvcache
from ..flash_attn_varlen import flash_attn_varlen_func
from ..reference import attention_ref, visible_keys

_WAY_OUT = (
    "compile layers in place of a whole model, whose traced masks are dense (layer.compile()), "
    'load the model with attn_implementation="sdpa", or have such calls go to PyTorch: '
    'register(unsupported="fallback")'
)
_UNLIMITED = (-1, -1)

# Arguments that models may pass to attention, that change its result and are not computed here.
_REFUSED = {
    "cache": "a paged cache",
    "block_table": "a paged cache",
    "output_attentions": "attention weights as an output",
    "indices": "attention to selected keys",
    "block_indices": "attention to selected blocks of keys",
    "sinks": "sinks other than one logit a head, s_aux,",
}


def register(name: str = "cute_attn", unsupported: str = "error") -> None:
    """Register flashcute's attention and its mask function with transformers under ``name``.

    Compile the layers of a model in place of the whole, ``for layer in model.layers:
    layer.compile()``. A mask that is made within a traced call is dense, which CUDA refuses. Such
    masks come from any ``attention_mask``, whose padding cannot be read there, and, without one,
    from calls without a cache, as in training: there transformers takes all ``position_ids`` for
    those of packed sequences, also those that the model made itself.

    Args:
        name: What to pass as ``attn_implementation``. It must not contain ``"flash"``: transformers
            takes such a name for a kernel to be downloaded and fails when the model is built.
        unsupported: What becomes of CUDA tensors under a mask or option that the kernels do not
            have: ``"error"`` raises a NotImplementedError that names it, ``"fallback"`` computes it
            with PyTorch, with one warning for each reason, whatever the sizes. On the CPU every
            mask and option is computed. A paged cache, attention to keys that an indexer selects
            and ``output_attentions`` are refused in any case, and on CUDA dtypes other than float16
            and bfloat16, which autocast gives a float32 model.

    Raises:
        TypeError: ``name`` is no str.
        ValueError: ``name`` is empty or contains ``"flash"``; another ``unsupported``.
    """
    if not isinstance(name, str):
        raise TypeError(
            f'register: expected name to be a str, got name={name!r}; use for example "cute_attn"'
        )
    if not name or "flash" in name:
        raise ValueError(
            f'register: expected a name without "flash" in it, got name={name!r}; transformers '
            'takes such a name for a kernel of its own, use for example name="cute_attn"'
        )
    if unsupported not in ("error", "fallback"):
        raise ValueError(
            f'register: expected unsupported="error" or "fallback", got {unsupported!r}; choose one'
        )
    forward = attention_forward if unsupported == "error" else _Fallback()
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


@functools.cache
def _look_up(config: type) -> str | None:
    """Returns the name of a configuration's model if that model computes all attention itself.

    It takes a mask that is None for one that shows everything, and the other masks for its own.
    """
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        found = mapping.get(config, ())
        for model in found if isinstance(found, tuple) else (found,):
            if not any(getattr(model, flag, False) for flag in _INTERFACES):
                return model.__name__
    return None


_INTERFACES = "_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn"


def _model_apart(config: type) -> str | None:
    return _look_up(config)


# Makes dynamo call it instead of tracing it, as torch.compiler.assume_constant_result does.
_model_apart._dynamo_marked_constant = True


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs,
) -> torch.Tensor | None:
    """Returns the mask of one forward pass, or None where the kernels need none.

    Args:
        batch_size, q_length, kv_length: Sizes of the mask.
        q_offset, kv_offset: Position of the first query and of the first key.
        mask_function: ``(batch, head, query, key) -> bool``, True where attention is allowed.
        attention_mask: ``(batch_size, length)`` bool, False at padding tokens.
        local_size: Width of a sliding window or of a chunk.
        allow_is_causal_skip: A causal mask may be left out: None.
        allow_is_bidirectional_skip: A mask that shows everything may be left out.
        kwargs: Passed on to ``transformers.masking_utils.sdpa_mask``.

    Returns:
        None, or a bool tensor ``(batch_size, 1, q_length, kv_length)``, True where attended; a
        ``KernelMask`` where the kernels express it, which has no memory. A traced call, in which
        the padding cannot be read, gets a dense one. For one token after a static cache int32
        ``(batch_size, 1, 1, 2)``, the first key of each row and the one behind its last.

    Raises:
        NotImplementedError: for a model, named by ``kwargs["config"]``, that would not call
            attention by the name that it was loaded with.
    """
    model = _model_apart(type(kwargs.get("config")))
    if model is not None:
        raise NotImplementedError(
            "cute_attn: expected a model that takes attention from transformers' AttentionInterface"
            f', got {model}, which computes its own; load it with attn_implementation="eager"'
        )

    def dense() -> torch.Tensor:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **kwargs,
        )

    if torch.compiler.is_compiling():
        # A traced call can neither read tensors nor take the mask's class.
        known = attention_mask is None and not isinstance(q_offset, torch.Tensor)
        causal = allow_is_causal_skip and known and q_offset + q_length == kv_offset + kv_length
        local = local_size is not None and kv_length >= local_size
        skip = (causal or allow_is_bidirectional_skip) and known and not local
        return None if skip else dense()
    pattern = recognise(mask_function)
    if pattern is None or (pattern.chunk is not None and kv_offset + kv_length > pattern.chunk):
        return dense()
    for_static_cache = q_length == 1 and pattern.causal and not allow_is_causal_skip
    padding = None
    if attention_mask is not None:
        padding, end = attention_mask.bool(), kv_offset + kv_length
        if padding.shape[1] < end:
            padding = torch.nn.functional.pad(padding, (0, end - padding.shape[1]))
        if padding.shape[1] != kv_length:
            padding = padding[:, kv_offset:end]
    offset = int(q_offset) - kv_offset
    if for_static_cache:
        # Some models ask for such a mask over all existing keys, to join it with others.
        static = isinstance(q_offset, torch.Tensor) or pattern.window != _UNLIMITED
        if not (static or offset + 1 < kv_length):
            return dense()
        device = kwargs.get("device", "cpu" if padding is None else padding.device)
        bounds = bounds_of_token(pattern, batch_size, kv_length, offset, padding, device)
        return dense() if bounds is None else bounds
    found = plan(pattern, q_length, kv_length, offset, padding)
    if found is None:
        return dense()
    may_skip = allow_is_causal_skip if found.causal else allow_is_bidirectional_skip
    if may_skip and found.is_plain and found.keys == kv_length:
        return None
    device = kwargs.get("device") or (None if padding is None else padding.device)
    return KernelMask.make((batch_size, 1, q_length, kv_length), device, found, dense)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Computes one layer's attention, with the signature that transformers calls.

    Args:
        module: The attention layer; its ``is_causal`` counts where the argument is None.
        query: ``(batch, heads, q_length, head_dim)``.
        key, value: ``(batch, kv_heads, kv_length, head_dim)``, heads not repeated. Under autocast
            all three are cast to its dtype, and the output has that.
        attention_mask: None, what :func:`attention_mask` returned, bool (True = attend) or float
            (added to the scores), broadcastable to ``(batch, heads, q_length, kv_length)``. It says
            everything but what ``cu_seq_lens_q`` adds: ``is_causal`` and ``sliding_window`` are in
            it already.
        dropout: Probability of dropping an attention weight.
        scaling: Softmax scale; ``head_dim ** -0.5`` if None.
        sliding_window: Window width, where ``attention_mask`` is None.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        is_causal: Bottom-right aligned causal mask, where ``attention_mask`` is None.
        s_aux: Attention sinks, one logit a head.
        position_bias: Float, added to the scores (T5); it replaces no mask.
        cu_seq_lens_q, cu_seq_lens_k: int32 (sequences + 1,), where packed sequences of a batch of
            one start.
        max_length_q, max_length_k: Longest lengths of the packed sequences.
        deterministic: Ask the kernels for bitwise repeatable gradients (ModernBERT).
        kwargs: What would change the result is refused: a paged cache, ``output_attentions``,
            selected keys, other sinks. The rest does not concern attention.

    Returns:
        ``(batch, q_length, heads, head_dim)`` and None in the place of attention weights.

    Raises:
        NotImplementedError: naming what the path for this device does not have.
        TypeError, ValueError: from :func:`flashcute.flash_attn_func`.
    """
    _refuse(kwargs)
    query, key, value = _cast_by_autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if type(dropout) is not float or dropout != 0.0:  # the usual value skips the check
        dropout = check_dropout("cute_attn", dropout)
    options = {"softmax_scale": scale, "softcap": softcap or 0.0, "dropout_p": dropout}
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    v_head_dim = v.shape[-1]
    if v_head_dim < q.shape[-1]:  # multi-head latent attention; zero columns change nothing else
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - v_head_dim))

    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    packs = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if isinstance(attention_mask, KernelMask) and (
        position_bias is not None
        or (packs and attention_mask.plan.has_padding)
        or attention_mask.sizes != (q.shape[1], k.shape[1])  # made for other queries or keys
    ):
        attention_mask = attention_mask.dense()
    if _is_bounds(attention_mask):
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if not (packs or wants_grad or dropout or position_bias is not None):
            out = _by_cache_kernels(q, k, v, attention_mask, s_aux, scale, softcap or 0.0)
            return out[..., :v_head_dim], None
        attention_mask = mask_of_bounds(attention_mask, k.shape[1])
    found = _asked(module, k.shape[1], attention_mask, sliding_window, is_causal)
    if packs:
        found = _packed(found, lengths, q.shape[0], k.shape[1])
    if position_bias is None and (attention_mask is None or isinstance(attention_mask, KernelMask)):
        options["deterministic"] = bool(deterministic)
        out = _by_kernels(q, k, v, found, s_aux, options)
        return out if out.shape[-1] == v_head_dim else out[..., :v_head_dim], None

    if query.device.type != "cpu":
        beyond = {"attention_mask": attention_mask, "position_bias": position_bias}
        name = next(name for name, tensor in beyond.items() if tensor is not None)
        raise NotImplementedError(
            f"cute_attn: expected {name}=None or a mask that the kernels express on "
            f"{query.device.type}, got {name} of shape {tuple(beyond[name].shape)}; {_WAY_OUT}"
        )
    bias = _additive_bias(q, k, attention_mask, position_bias, found)
    out, _, _ = attend(q, k, v, attn_bias=bias, sinks=s_aux, **options)
    return out[..., :v_head_dim], None


def _is_bounds(mask: torch.Tensor | None) -> bool:
    return not (mask is None or isinstance(mask, KernelMask)) and mask.dtype == torch.int32


def _by_cache_kernels(q, k, v, bounds, sinks, scale, softcap) -> torch.Tensor:
    """Computes attention of one token to the keys within ``bounds`` of a static cache.

    q is (batch, 1, heads, head_dim), k and v are (batch, kv_length, kv_heads, head_dim).
    """
    first, end = (x.contiguous() for x in bounds[:, 0, 0].unbind(-1))  # (batch,)
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=end, cache_leftpad=first, softmax_scale=scale, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip


def _cast_by_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Casts tensors to autocast's dtype where it is on, as PyTorch's attention does.

    Rotary embedding and a cache make float32 of what a layer's projections gave in 16 bits.
    """
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _asked(
    module, n_k: int, mask: torch.Tensor | None, sliding_window: int | None, is_causal: bool | None
) -> Plan:
    """Returns what is seen of ``n_k`` keys as a plan; beside a dense mask, everything."""
    if isinstance(mask, KernelMask):
        return mask.plan
    if mask is not None:
        return Plan(False, _UNLIMITED, n_k)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    # Windows are counted as in flash-attn: the query is one of sliding_window keys.
    window = _UNLIMITED
    if sliding_window is not None and n_k > sliding_window:
        window = sliding_window - 1, 0 if causal else sliding_window - 1
    return Plan(causal, window, n_k)


def _packed(found: Plan, lengths: tuple, batch: int, keys: int) -> Plan:
    """Returns ``found`` for sequences that the caller has packed."""
    if batch != 1 or None in lengths:
        raise ValueError(
            "cute_attn: expected cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k with "
            f"a batch of one, got a batch of {batch} and "
            f"{['absent' if x is None else type(x).__name__ for x in lengths]}; pass all of them"
        )
    return Plan(found.causal, found.window, keys, (*lengths[:2], *map(int, lengths[2:])))


def _by_kernels(q, k, v, found: Plan, sinks, options: dict) -> torch.Tensor:
    """Computes attention of (batch, length, heads, head_dim) tensors under a plan."""
    if found.keys < k.shape[1]:
        k, v = k[:, : found.keys], v[:, : found.keys]
    options = options | {"causal": found.causal, "window_size": found.window}
    if sinks is not None:
        options["sinks"] = sinks
    if found.lengths is None:
        return flash_attn_func(q, k, v, **options)
    batch, q_length = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if found.query_rows is not None:
        q = index_first_axis(q, found.query_rows)
    if found.key_rows is not None:
        k, v = (index_first_axis(x, found.key_rows) for x in (k, v))
    used_q, used_k = found.used
    out = flash_attn_varlen_func(
        q, k, v, *found.lengths, seqused_q=used_q, seqused_k=used_k, **options
    )
    if found.query_rows is not None:
        out = index_put_first_axis(out, found.query_rows, batch * q_length)
    return out.view(batch, q_length, *out.shape[1:])


class _Fallback:
    """:func:`attention_forward`, with PyTorch for what that does not support."""

    def __init__(self):
        self._said: set[str] = set()

    def __call__(self, module, query, key, value, attention_mask, **options):
        try:
            return attention_forward(module, query, key, value, attention_mask, **options)
        except NotImplementedError as error:
            _refuse(options)
            if options.get("cu_seq_lens_q") is not None:
                raise  # no mask says where these sequences are
            reason = f"{error}"
        kind = reason.partition(", got ")[0]  # what was got grows with each token of generate()
        if kind not in self._said:
            self._said.add(kind)
            text = f"cute_attn: PyTorch computes what the kernels do not: {reason}"
            warnings.warn(text, stacklevel=2)
        return _by_pytorch(module, query, key, value, attention_mask, **options), None


def _by_pytorch(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    position_bias=None,
    **kwargs,
) -> torch.Tensor:
    """Computes attention by SDPA, or by the reference for options that SDPA lacks.

    It takes memory for all scores.
    """
    query, key, value = _cast_by_autocast(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(attention_mask, KernelMask):
        attention_mask = attention_mask.dense()
    elif _is_bounds(attention_mask):
        attention_mask = mask_of_bounds(attention_mask, k.shape[1])
    found = _asked(module, k.shape[1], attention_mask, sliding_window, is_causal)
    bias = _additive_bias(q, k, attention_mask, position_bias, found).to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not softcap and s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    keep = None
    if dropout:
        keep = torch.rand((*query.shape[:3], key.shape[2]), device=query.device) >= dropout
    return attention_ref(
        q, k, v, softmax_scale=scale, softcap=softcap or 0.0, sinks=s_aux, attn_bias=bias,
        dropout_p=dropout, dropout_mask=keep,
    ).out  # fmt: skip


def _refuse(kwargs: dict) -> None:
    for name, what in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise NotImplementedError(
                f"cute_attn: expected {name} unset ({what} is not supported), got {name}="
                f"{type(value).__name__}; leave it out, or load the model with "
                'attn_implementation="eager"'
            )


def _additive_bias(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    found: Plan,
) -> torch.Tensor:
    """Returns what is added to the scores of (batch, length, heads, head_dim) tensors.

    This is a bias, and -inf where a key is hidden.
    """
    # A mask contains everything but the packed sequences that the caller gave.
    seen = _visible(q, k, found) if mask is None or found.lengths is not None else None
    total = position_bias
    for part in (mask, seen):
        if part is not None:
            hides = part.dtype == torch.bool
            bias = torch.where(part, 0.0, float("-inf")) if hides else part
            total = bias if total is None else total + bias
    return total


def _visible(q: torch.Tensor, k: torch.Tensor, found: Plan) -> torch.Tensor:
    """Returns which keys each query sees: bool, broadcastable to (q_length, kv_length)."""
    n_q, n_k, device = q.shape[1], k.shape[1], q.device
    if found.lengths is None:
        return visible_keys(n_q, n_k, found.causal, found.window, device=device)
    ends_q, ends_k = found.lengths[:2]  # (sequences + 1,)
    row = torch.arange(n_q, device=device, dtype=ends_q.dtype)
    key = torch.arange(n_k, device=device, dtype=ends_k.dtype)
    row_end = torch.searchsorted(ends_q, row, right=True)  # (q_length,)
    key_end = torch.searchsorted(ends_k, key, right=True)  # (kv_length,)
    # The last query of a sequence is aligned with its last key.
    place = (row - ends_q[row_end] + ends_k[row_end])[:, None]
    left, right = found.window[0], 0 if found.causal else found.window[1]
    visible = row_end[:, None] == key_end
    if left >= 0:
        visible &= key >= place - left
    if right >= 0:
        visible &= key <= place + right
    return visible
