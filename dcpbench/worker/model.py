"""A dense decoder-only GPT on packed rows, in two flavours that share one code path.

modern: RMSNorm, rotary positions, SwiGLU, grouped KV heads, no biases. classic: LayerNorm, learned
positions, GELU, biases. All tensors are packed: their first dimension is `rows`, the rows this rank
holds of a microbatch; only attention looks at sequences, and it is handed in.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcpbench import spec
from dcpbench.dcp.attention.backend import Attention
from dcpbench.spec import Recompute
from dcpbench.worker.linear import Embedding, Linear
from dcpbench.worker.loss import linear_cross_entropy
from dcpbench.worker.recompute import linear_of, recomputed


class Rope:
    """Rotary position angles of the rows of one microbatch, made once for all layers."""

    def __init__(self, positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> None:
        # Angles in float64: at position 10^5 a float32 product is already wrong in the fourth digit.
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        angles = positions.to(torch.float64)[:, None] * theta**-exponents
        self.cos = angles.cos().to(dtype)[:, None, :]
        self.sin = angles.sin().to(dtype)[:, None, :]

    def __call__(self, x_thd: Tensor) -> Tensor:
        """Rotates x (rows, heads, dim), pairing dimension i with i + dim/2."""
        first, second = x_thd.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, model: spec.Model, recompute: Recompute) -> None:
        super().__init__()
        modern = model.flavour == "modern"
        self.recompute = recompute
        self.heads, self.kv_heads, self.dim = model.attention_heads, model.kv, model.dim
        self.activation = swiglu if modern else gelu
        width, bias = model.hidden_size, not modern
        self.attention_norm = _norm(model)
        self.qkv = Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=bias)
        self.attention_out = Linear(self.heads * self.dim, width, bias=bias)
        self.ffn_norm = _norm(model)
        self.ffn_in = Linear(width, model.ffn_hidden_size * (2 if modern else 1), bias=bias)
        self.ffn_out = Linear(model.ffn_hidden_size, width, bias=bias)

    def forward(self, x: Tensor, rope: Rope | None, attention: Attention) -> Tensor:
        """x (rows, width) -> (rows, width)."""
        if self.recompute == "full":
            return recomputed(lambda x: self._forward(x, rope, attention), x)
        return self._forward(x, rope, attention)

    def _forward(self, x: Tensor, rope: Rope | None, attention: Attention) -> Tensor:
        qkv_thd = self._linear(self.qkv, self.attention_norm, x).view(len(x), -1, self.dim)
        q_thd, k_thd, v_thd = qkv_thd.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rope is not None:
            q_thd, k_thd = rope(q_thd), rope(k_thd)
        x = x + self.attention_out(attention(q_thd, k_thd, v_thd).flatten(1))
        inner = self._linear(self.ffn_in, self.ffn_norm, x)
        return x + self._linear(self.ffn_out, self.activation, inner)

    def _linear(self, linear: Linear, before: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return linear_of(linear, before, x) if self.recompute == "selective" else linear(before(x))


def swiglu(inner: Tensor) -> Tensor:
    """inner (rows, 2 x width), gate first -> (rows, width)."""
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(inner: Tensor) -> Tensor:
    """GELU, tanh form."""
    return F.gelu(inner, approximate="tanh")


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
            rope = Rope(positions, self.config.dim, self.config.rope_theta, x.dtype)
        else:
            # Padding may lie behind the last learned position; what it holds reaches no real row.
            x = x + self.position_embedding(positions.clamp(max=self.position_embedding.num_embeddings - 1))
        for number, block in enumerate(self.blocks):
            if finished is not None:
                # The gradient of a block's input exists once all its matrices have been multiplied with.
                x.register_hook(functools.partial(_tell, finished, f"blocks.{number}"))
            x = block(x, rope, attention)
        loss_sum = linear_cross_entropy(self.final_norm(x), self.output.weight, labels)
        if finished is not None and self.output is not self.embedding:
            finished("output")
        return loss_sum


def _tell(finished: Callable[[str], None], segment: str, grad: Tensor) -> None:
    finished(segment)


def _norm(model: spec.Model) -> nn.Module:
    if model.flavour == "modern":
        return nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
    return nn.LayerNorm(model.hidden_size, eps=model.norm_eps)


def initialise(weights: Mapping[str, Tensor], config: spec.Model, seed: int) -> None:
    """Fills `weights` (by parameter name) with values that depend on the seed and the name only.

    Every parameter has its own CPU generator, so neither the number of ranks, nor the case, nor the
    device, nor the order of the modules changes them. Matrices are normal with `init_std`; those that
    write to the residual stream are scaled by 1/sqrt(2 x layers) (GPT-2's rule); norms are one, biases zero.
    """
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") & (2**63 - 1))
        residual = name.endswith(("attention_out.weight", "ffn_out.weight"))
        std = config.init_std / (math.sqrt(2 * config.layers) if residual else 1.0)
        weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))


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
