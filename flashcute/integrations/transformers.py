"""flashcute as an attention implementation of Hugging Face transformers (5.x).

>>> from flashcute.integrations.transformers import register
>>> register()
>>> model = AutoModel.from_pretrained(folder, attn_implementation="cute_attn")

transformers hands attention two things that must agree: a mask, made once per forward by a mask
function, and the call itself, made once per layer. Both are registered under one name: without a
mask function of that name transformers drops the mask silently, and padding is attended to.

What the mask function returns decides the path. ``None`` means "the kernel can express it": full
attention, or causal attention aligned to the bottom-right corner, which includes a chunk of new
tokens after a KV cache. Anything else (padding, packed sequences, a sliding window that is shorter
than the keys, chunked attention, a static cache) becomes a boolean mask, which the CPU reference
applies exactly and which the CUDA path refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        f"flashcute.integrations.transformers: expected transformers 5.17 or later, got: {error}; "
        "`pip install 'transformers>=5.17'`",
        name=error.name,
    ) from error

from ..checks import check_dropout
from ..cpu_ops import attend
from ..flash_attn_interface import flash_attn_func

_WAY_OUT = (
    "run sequences one by one without padding and with a dynamic cache, "
    'or load the model with attn_implementation="sdpa"'
)


def register(name: str = "cute_attn") -> None:
    """Register flashcute's attention and its mask function with transformers under ``name``.

    Args:
        name: What to pass as ``attn_implementation``. It must not contain ``"flash"``: transformers
            takes such a name for a kernel to be downloaded and fails when the model is built.

    Raises:
        ValueError: ``name`` is empty or contains ``"flash"``.
    """
    if not name or "flash" in name:
        raise ValueError(
            f'register: expected a name without "flash" in it, got name={name!r}; transformers '
            'takes such a name for a kernel of its own, use for example name="cute_attn"'
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


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
    """The mask of one forward pass, or None where the kernels need none.

    Args:
        batch_size, q_length, kv_length: Sizes of the mask.
        q_offset, kv_offset: Position of the first query and of the first key.
        mask_function: ``(batch, head, query, key) -> bool``, True where attention is allowed.
        attention_mask: ``(batch_size, length)`` bool, False at padding tokens.
        local_size: Width of a sliding window or of a chunk.
        allow_is_causal_skip: ``mask_function`` is the plain causal one (up to ``local_size``).
        allow_is_bidirectional_skip: ``mask_function`` is always True (up to ``local_size``).
        kwargs: Passed on to ``transformers.masking_utils.sdpa_mask``.

    Returns:
        None, or a bool tensor ``(batch_size, 1, q_length, kv_length)``, True where attended.
    """
    # SDPA's own causal flag is aligned to the top-left corner; ours is aligned to the bottom-right
    # one, so what may be left to it is another set of cases than in transformers' sdpa_mask.
    causal = allow_is_causal_skip and bool(q_offset + q_length == kv_offset + kv_length)
    local = local_size is not None and kv_length >= local_size
    expressible = (causal or allow_is_bidirectional_skip) and not local
    if expressible and _masks_nothing(attention_mask, kv_offset, kv_length):
        return None
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


def _masks_nothing(padding_mask: torch.Tensor | None, kv_offset: int, kv_length: int) -> bool:
    if padding_mask is None:
        return True
    if torch.compiler.is_compiling():  # reading the mask would break the graph
        return False
    visible = padding_mask[:, kv_offset : kv_offset + kv_length]
    return visible.shape[1] == kv_length and bool(visible.all())


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
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """One layer's attention with the signature transformers calls.

    Args:
        module: The attention layer; its ``is_causal`` counts where the argument is None.
        query: ``(batch, heads, q_length, head_dim)``.
        key, value: ``(batch, kv_heads, kv_length, head_dim)``, heads not repeated.
        attention_mask: None, or bool (True = attend) or float (added to the scores),
            broadcastable to ``(batch, heads, q_length, kv_length)``. It says everything:
            ``is_causal`` and ``sliding_window`` are in it already.
        dropout: Probability of dropping an attention weight.
        scaling: Softmax scale; ``head_dim ** -0.5`` if None.
        sliding_window: Window width, where ``attention_mask`` is None.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        is_causal: Bottom-right aligned causal mask, where ``attention_mask`` is None.
        s_aux: Attention sinks, one logit a head.
        position_bias: Float, added to the scores (T5).
        kwargs: What a paged cache, packed sequences or ``output_attentions`` come in is refused;
            the rest does not concern attention.

    Returns:
        ``(batch, q_length, heads, head_dim)`` and None in the place of attention weights.

    Raises:
        NotImplementedError: naming what the path for this device does not have.
        TypeError, ValueError: from :func:`flashcute.flash_attn_func`.
    """
    _refuse(kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dropout_p = check_dropout("cute_attn", dropout)
    options = {"softmax_scale": scale, "softcap": softcap or 0.0, "dropout_p": dropout_p}
    if attention_mask is None:
        options["causal"] = bool(causal)
        # Windows are counted as in flash-attn: the query itself is one of sliding_window keys.
        if sliding_window is not None and key.shape[2] > sliding_window:
            options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    v_head_dim = v.shape[-1]
    if v_head_dim < q.shape[-1]:  # multi-head latent attention; zero columns change nothing else
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - v_head_dim))

    beyond_flash = {
        "attention_mask": attention_mask,
        "s_aux": s_aux,
        "position_bias": position_bias,
    }
    present = [name for name, tensor in beyond_flash.items() if tensor is not None]
    if not present:
        return flash_attn_func(q, k, v, **options)[..., :v_head_dim], None
    if query.device.type != "cpu":
        name = present[0]
        shape = tuple(beyond_flash[name].shape)
        raise NotImplementedError(
            f"cute_attn: expected {name}=None on {query.device.type}, got {name} of shape {shape}; "
            f"{_WAY_OUT}"
        )
    bias = _additive_bias(attention_mask, position_bias)
    out, _, _ = attend(q, k, v, attn_bias=bias, sinks=s_aux, **options)
    return out[..., :v_head_dim], None


def _refuse(kwargs: dict) -> None:
    reasons = {
        "cache": "a paged cache",
        "cu_seq_lens_q": "packed sequences",
        "cu_seq_lens_k": "packed sequences",
        "output_attentions": "attention weights as an output",
    }
    for name, what in reasons.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise NotImplementedError(
                f"cute_attn: expected {name} unset ({what} is not supported), got {name}="
                f"{type(value).__name__}; {_WAY_OUT}"
            )


def _additive_bias(
    mask: torch.Tensor | None, position_bias: torch.Tensor | None
) -> torch.Tensor | None:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    if mask is None or position_bias is None:
        return position_bias if mask is None else mask
    return mask + position_bias
