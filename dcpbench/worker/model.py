"""A dense decoder-only GPT on packed rows, in two flavours that share one code path.

modern: RMSNorm, rotary positions, SwiGLU, grouped KV heads, no biases. classic: LayerNorm, learned
positions, GELU, biases. All tensors are packed: their first dimension is `rows`, the rows this rank
holds of a microbatch; only attention looks at sequences, and it is handed in.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dcpbench import spec
from dcpbench.dcp.attention.backend import Attention
from dcpbench.spec import Recompute
from dcpbench.worker.fused import Rope, add_norm, gelu, heads_of, swiglu
from dcpbench.worker.linear import Embedding, Linear, kernels_serve
from dcpbench.worker.loss import linear_cross_entropy
from dcpbench.worker.recompute import linear_of, recomputed

Norm = nn.LayerNorm | nn.RMSNorm

_INITIALISING_THREADS = 4
"""Several ranks share the cores of a machine, and each thread holds one parameter in float32."""


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, model: spec.Model, recompute: Recompute) -> None:
        super().__init__()
        modern = model.flavour == "modern"
        self.recompute = recompute
        self.heads, self.kv_heads, self.dim = model.attention_heads, model.kv, model.dim
        self.gated = modern
        width, bias = model.hidden_size, not modern
        # The branches' biases are added, and get their gradient, where the branches are added; selective
        # recomputation splits that.
        adds: Literal["nothing", "all"] = "nothing" if recompute == "selective" else "all"
        self.attention_norm = _norm(model)
        self.qkv = Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias, user_does="gradient")
        self.attention_out = Linear(self.heads * self.dim, width, bias, user_does=adds)
        self.ffn_norm = _norm(model)
        self.ffn_in = Linear(width, model.ffn_hidden_size * (2 if modern else 1), bias, user_does="all")
        self.ffn_out = Linear(model.ffn_hidden_size, width, bias, user_does=adds)

    def forward(
        self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, rope: Rope | None, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """(stream, branch) -> (stream, branch), all (rows, width): the branch is still to be added to the stream.

        `branch_bias` is the bias of the layer that made the branch, if it leaves it to the adding.
        """
        if self.recompute == "full":
            x, branch = recomputed(lambda x, branch: self._forward(x, branch, branch_bias, rope, attention), x, branch)
            return x, branch
        return self._forward(x, branch, branch_bias, rope, attention)

    def _forward(
        self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, rope: Rope | None, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        x, qkv = self._after_norm(x, branch, branch_bias, self.attention_norm, self.qkv)
        q_thd, k_thd, v_thd = heads_of(qkv, self.heads, self.kv_heads, rope, self.qkv.bias_for_user(x))
        branch = self.attention_out(attention(q_thd, k_thd, v_thd).flatten(1))
        x, inner = self._after_norm(x, branch, self.attention_out.bias_for_user(x), self.ffn_norm, self.ffn_in)
        if self.recompute == "selective":
            return x, linear_of(self.ffn_out, self._activation, inner)
        return x, self.ffn_out(self._activation(inner))

    def _after_norm(
        self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, norm: Norm, linear: Linear
    ) -> tuple[Tensor, Tensor]:
        """(x + branch, linear(norm(x + branch)))."""
        if self.recompute == "selective":
            x = x if branch is None else x + branch
            return x, linear_of(linear, lambda x: add_norm(x, None, norm)[1], x)
        x, normed = add_norm(x, branch, norm, branch_bias)
        return x, linear(normed)

    def bias_for_user(self, x: Tensor) -> Tensor | None:
        """The bias of the layer that makes this block's branch, if it leaves it to the adding."""
        return self.ffn_out.bias_for_user(x)

    def _activation(self, inner: Tensor) -> Tensor:
        return swiglu(inner) if self.gated else gelu(inner, self.ffn_in.bias_for_user(inner))


class GPT(nn.Module):
    """Token ids in, summed loss out."""

    def __init__(self, model: spec.Model, max_positions: int, recompute: Recompute = "none") -> None:
        super().__init__()
        self.config = model
        modern = model.flavour == "modern"
        self.embedding = Embedding(model.vocab_size, model.hidden_size)
        self.position_embedding = None if modern else Embedding(max_positions, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model, recompute) for _ in range(model.layers))
        self.final_norm = _norm(model)
        self.output = self.embedding if model.tied else Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        attention: Attention,
        finished: Callable[[str], None] | None = None,
    ) -> Tensor:
        """The sum of the cross-entropy over this rank's labelled rows, a float64 scalar.

        Shapes: tokens, labels and positions (rows,) int64. `finished` is told the name of a segment of
        the flat buffers (see `parameters.py`) as soon as this microbatch has added all of its gradient:
        `output` before this returns, the blocks from last to first during the backward.
        """
        x = self.embedding(tokens)
        rope = None
        if self.position_embedding is None:
            dtype = torch.float32 if kernels_serve(x) else x.dtype
            rope = Rope(positions, self.config.dim, self.config.rope_theta, dtype)
        else:
            # Padding may lie behind the last learned position; what it holds reaches no real row.
            x = x + self.position_embedding(positions.clamp(max=self.position_embedding.num_embeddings - 1))
        branch: Tensor | None = None
        branch_bias: Tensor | None = None
        for number, block in enumerate(cast(Iterable[Block], self.blocks)):
            if finished is not None:
                # What enters a block last has its gradient once all its matrices have been multiplied with.
                entry = x if branch is None else branch
                entry.register_hook(functools.partial(_tell, finished, f"blocks.{number}"))
            x, branch = block(x, branch, branch_bias, rope, attention)
            branch_bias = block.bias_for_user(x)
        _, normed = add_norm(x, branch, self.final_norm, branch_bias)
        loss_sum = linear_cross_entropy(normed, self.output.weight, labels)
        if finished is not None and self.output is not self.embedding:
            finished("output")
        return loss_sum


def _tell(finished: Callable[[str], None], segment: str, grad: Tensor) -> None:
    finished(segment)


def _norm(model: spec.Model) -> Norm:
    if model.flavour == "modern":
        return nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
    return nn.LayerNorm(model.hidden_size, eps=model.norm_eps)


def initialise(weights: Mapping[str, Tensor], config: spec.Model, seed: int) -> None:
    """Fills `weights` (by parameter name) with values that depend on the seed and the name only.

    Every parameter has its own CPU generator, so neither the number of ranks, nor the case, nor the
    device, nor the order of the modules changes them. Matrices are normal with `init_std`; those that
    write to the residual stream are scaled by 1/sqrt(2 x layers) (GPT-2's rule); norms are one, biases zero.
    """

    def fill(name: str, weight: Tensor) -> None:
        if weight.ndim == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            return
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") & (2**63 - 1))
        residual = name.endswith(("attention_out.weight", "ffn_out.weight"))
        std = config.init_std / (math.sqrt(2 * config.layers) if residual else 1.0)
        weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))

    # A generator runs on one core, so a billion values would take as long as all iterations of a short launch.
    with ThreadPoolExecutor(max_workers=_INITIALISING_THREADS) as pool:
        largest_first = sorted(weights.items(), key=lambda item: -item[1].numel())
        for done in [pool.submit(fill, name, weight) for name, weight in largest_first]:
            done.result()


def flops(model: spec.Model) -> tuple[float, float]:
    """(FLOPs per token, FLOPs per squared sequence length) of one forward and backward pass.

    Three passes (one forward, two backward) of two operations per multiply-add; causal attention
    counts half of the square. Recomputation is not counted. Formula: reference notes on Megatron-LM's
    FLOP count, section 6.2, with the vocabulary as given.
    """
    width, queries, keys = model.hidden_size, model.attention_heads * model.dim, model.kv * model.dim
    matrices = 3 if model.flavour == "modern" else 2
    layer = width * model.ffn_hidden_size * matrices + width * (queries + 2 * keys) + queries * width
    return 6.0 * (model.layers * layer + width * model.vocab_size), 6.0 * model.layers * queries
