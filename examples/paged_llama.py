"""A Llama of Hugging Face transformers that decodes over a paged cache of keys and values.

The modules and weights are transformers' own. Attention, the rotation of queries and keys by their
positions, and the cache are flashcute's, in one call per layer. The same function fills the cache
with a prompt and decodes a token. On CUDA a decoding step of the whole batch is one CUDA graph:
lengths, pages and tokens stay at their addresses, so the graph serves sequences while they grow,
and other sequences after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from flashcute import flash_attn_with_kvcache

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NO_PAGE = -1  # an empty entry of a block table, which kernels never read


class PagedCache:
    """Keys and values of all layers in one pool of pages, which sequences take as they grow.

    Args:
        model: Gives the number of layers and heads, the dtype and the device.
        room: How many tokens each sequence of a batch may have at most.
        page_size: Tokens of a page, from 1 on.
        seed: Seed of the order in which pages are given out: a sequence's pages are not adjacent.
    """

    def __init__(
        self, model: LlamaForCausalLM, room: Sequence[int], page_size: int, seed: int = 0
    ) -> None:
        config = model.config
        pages = [-(-n // page_size) for n in room]
        heads = config.num_key_value_heads
        # (layers, pages, page_size, heads, head_dim)
        shape = (config.num_hidden_layers, sum(pages), page_size, heads, config.head_dim)
        like = {"dtype": model.dtype, "device": model.device}
        self.keys, self.values = (torch.empty(shape, **like) for _ in "kv")
        # Read by the kernels: the pages of each sequence and its number of tokens so far.
        whole = {"dtype": torch.int32, "device": model.device}
        self.table = torch.empty(len(pages), max(pages), **whole)
        self.lengths = torch.empty(len(pages), **whole)
        self.page_size, self._most = page_size, tuple(room)
        generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(sum(pages), generator=generator).tolist()
        self.clear()

    def clear(self) -> None:
        """Takes all pages back."""
        self.table.fill_(NO_PAGE)
        self.lengths.zero_()
        self._free = list(self._order)
        self._held = [0] * len(self.table)

    def reserve(self, tokens: Sequence[int]) -> None:
        """Gives each sequence i the pages that it lacks for ``tokens[i]`` tokens.

        The host does not wait for the device.

        Raises:
            ValueError: for more tokens than the sequence has room for.
        """
        new = []
        for i, (n, most) in enumerate(zip(tokens, self._most, strict=True)):
            if n > most:
                raise ValueError(
                    f"PagedCache.reserve: expected at most {most} tokens of sequence {i}, got "
                    f"tokens[{i}]={n}; make the cache with more room"
                )
            wanted = -(-n // self.page_size)
            new += [(i, column, self._free.pop()) for column in range(self._held[i], wanted)]
            self._held[i] = max(self._held[i], wanted)
        if new:
            entries = torch.tensor(new, pin_memory=self.table.is_cuda)
            rows, columns, pages = entries.to(self.table.device, non_blocking=True).unbind(1)
            self.table[rows, columns] = pages.int()


class PagedLlama:
    """A model that chooses the likeliest token each time, over a :class:`PagedCache`.

    Rotary tables are the model's own, in its dtype, for all positions that the cache has. They go
    to the kernel, which rotates in float32 and rounds once; transformers rounds both products and
    their sum in the model's dtype. So the keys here are at least as exact as transformers'.

    Args:
        model: A Llama in a dtype that flashcute supports on its device.
        cache: A cache made for this model.
        graph: Whether decoding steps run as a CUDA graph.
    """

    def __init__(self, model: LlamaForCausalLM, cache: PagedCache, graph: bool) -> None:
        self.model, self.cache = model, cache
        room = cache.table.shape[1] * cache.page_size
        places = torch.arange(room, device=model.device)
        with torch.no_grad():
            tables = model.model.rotary_emb(model.lm_head.weight, places[None])  # (1, room, d) each
        # transformers repeats the angles in both halves of a row; the kernel takes one half.
        self.cos, self.sin = (x[0].chunk(2, dim=-1)[0].contiguous() for x in tables)
        b = len(cache.lengths)
        self.tokens = torch.empty(b, 1, dtype=torch.int64, device=model.device)
        self.logits = torch.empty(
            b, model.config.vocab_size, dtype=model.dtype, device=model.device
        )
        self._step = self._record if graph else self._advance

    def forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Appends tokens to sequences of the cache.

        Args:
            tokens: int64 (b, s).
            lengths: int32 (b,): how many tokens each sequence has already; not modified.
            table: int32 (b, max_pages): the pages of each sequence, with room for s more tokens.

        Returns:
            The logits after each sequence's last token, (b, vocabulary).
        """
        decoder = self.model.model
        x = decoder.embed_tokens(tokens)  # (b, s, hidden)
        for layer, keys, values in zip(
            decoder.layers, self.cache.keys, self.cache.values, strict=True
        ):
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (p(y).unflatten(-1, (-1, attention.head_dim)) for p in projections)
            out = flash_attn_with_kvcache(
                *(q, keys, values, k, v, self.cos, self.sin),
                cache_seqlens=lengths,
                block_table=table,
                softmax_scale=attention.scaling,
                causal=True,
                rotary_interleaved=False,
            )  # (b, s, h, d)
            x = x + attention.o_proj(out.flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(decoder.norm(x[:, -1]))

    def _advance(self) -> None:
        """Decodes one token of each sequence.

        Reads ``tokens``; writes ``logits`` and the next ``tokens``.
        """
        self.logits.copy_(self.forward(self.tokens, self.cache.lengths, self.cache.table))
        torch.argmax(self.logits, dim=-1, keepdim=True, out=self.tokens)
        self.cache.lengths += 1

    def _record(self) -> None:
        """Runs the first step and records it as a graph, which later steps replay."""
        state = self.tokens, self.cache.lengths
        before = [x.clone() for x in state]
        # The first call builds kernels and lets libraries allocate, which no graph may capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        # With the state restored, the recorded step appends the same tokens at the same positions.
        for x, y in zip(state, before, strict=True):
            x.copy_(y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self._step = graph.replay
        graph.replay()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        new_tokens: int,
        mark: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Continues every prompt by ``new_tokens`` tokens.

        Args:
            prompts: int64, of any lengths of at least 1, one for each sequence of the cache.
            new_tokens: At least 1.
            mark: Called whenever one more token of each sequence has been enqueued.

        Returns:
            The tokens, int64 (b, new_tokens), and their logits, (new_tokens, b, vocabulary).
        """
        cache = self.cache
        cache.clear()
        cache.reserve([len(prompt) for prompt in prompts])
        for i, prompt in enumerate(prompts):
            one = slice(i, i + 1)
            self.logits[one] = self.forward(prompt[None], cache.lengths[one], cache.table[one])
            cache.lengths[one] += len(prompt)
        torch.argmax(self.logits, dim=-1, keepdim=True, out=self.tokens)
        tokens = self.tokens.new_empty(len(prompts), new_tokens)
        logits = self.logits.new_empty(new_tokens, *self.logits.shape)
        for n in range(new_tokens):
            if n > 0:
                cache.reserve([len(prompt) + n for prompt in prompts])
                self._step()
            tokens[:, n : n + 1], logits[n] = self.tokens, self.logits
            mark()
        return tokens, logits
