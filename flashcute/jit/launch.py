"""One call of a given kernel, without the choice by :mod:`flashcute.heuristics`."""

from __future__ import annotations

import ctypes

import torch

from .abi import FlashKernel, fwd_params


class Call:
    """A kernel with the arguments of one problem: calling it only enqueues the kernel.

    Nothing is checked: with tensors that do not fit, the kernel accesses memory out of bounds.

    Args:
        kernel: The description in the kernel's shared object.
        q: (b, seqlen_q, h, d) on a GPU, last dimension contiguous, the other strides multiples of
            16 bytes.
        k: (b, seqlen_k, h_k, d), with strides as for q; h_k divides h.
        v: (b, seqlen_k, h_k, d), with strides as for q.
        softmax_scale: Factor on the scores; 1 / sqrt(d) by default.
        outputs: out and lse to be written; new contiguous ones by default.
        pack_heads: Whether the query heads of a key head share tiles.
        window_size: (left, right) of a kernel with the mask ``"local"``, both >= 0.

    Attributes:
        out: (b, seqlen_q, h, d) in the dtype of q.
        lse: (b, h, seqlen_q), float32, contiguous, natural logarithm.
    """

    def __init__(
        self,
        kernel: FlashKernel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        pack_heads: bool = False,
        window_size: tuple[int, int] = (0, 0),
    ) -> None:
        b, seqlen_q, h, d = q.shape
        if outputs is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            outputs = out, q.new_empty((b, h, seqlen_q), dtype=torch.float32)
        self.out, self.lse = outputs
        self._kernel = kernel
        # Keeps the tensors alive, as the parameters hold their addresses.
        self._tensors = {"q": q, "k": k, "v": v, "o": self.out, "softmax_lse": self.lse}
        scale = d**-0.5 if softmax_scale is None else softmax_scale
        self._params = fwd_params(self._tensors, scale, pack_heads, window_size)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueues the kernel on the current stream; returns :attr:`out` and :attr:`lse`.

        Raises:
            RuntimeError: if the launch fails.
        """
        if self.out.numel() > 0:
            with torch.cuda.device(self.out.device):
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                error = self._kernel.launch(ctypes.byref(self._params), stream)
            if error:
                name, message = self._kernel.name, self._kernel.error_string(error)
                raise RuntimeError(f"{name.decode()} failed to launch: {message.decode()}")
        return self.out, self.lse
