"""Parameters, gradients and AdamW over flat buffers: one reduction, one norm, one update per iteration.

Master weights and accumulated gradients are float32 in one buffer each. In float32 compute the
parameters are views of the master buffer and autograd accumulates straight into the gradient
buffer; in a narrower type they are views of a buffer of that type, and each gradient is added to
the float32 buffer as soon as autograd has finished it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpbench.spec import Training

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many elements, for aligned vector loads."""


class FlatParameters:
    """The parameters of a model laid out in flat buffers; those with weight decay come first.

    The model may have been built on the meta device: its parameters are replaced by views of new,
    zeroed buffers. Fill `named_master()` and call `publish()`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device, exact: torch.dtype) -> None:
        named = list(model.named_parameters())
        # Decay acts on matrices only: biases, norms and other vectors are exempt.
        named.sort(key=lambda item: item[1].ndim < 2)
        self.slices: dict[str, slice] = {}
        offset = decayed = 0
        for name, parameter in named:
            self.slices[name] = slice(offset, offset + parameter.numel())
            offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if parameter.ndim >= 2:
                decayed = offset
        self.decayed = decayed
        self.count = sum(parameter.numel() for _, parameter in named)
        self.master = torch.zeros(offset, dtype=exact, device=device)
        self.grad = torch.zeros_like(self.master)
        self.compute = self.master if dtype == exact else torch.zeros(offset, dtype=dtype, device=device)
        self._shapes = {name: parameter.shape for name, parameter in named}
        for name, shape in self._shapes.items():
            part = self.slices[name]
            parameter = nn.Parameter(self.compute[part].view(shape))
            grad = self.grad[part].view(shape)
            if dtype == exact:
                parameter.grad = grad
            else:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(grad))
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, parameter)

    def publish(self) -> None:
        """Copies the master weights to the compute weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def named_master(self) -> dict[str, Tensor]:
        """The float32 weights by parameter name, as views of the master buffer."""
        return {name: self.master[part].view(self._shapes[name]) for name, part in self.slices.items()}

    def reduce(self) -> None:
        """Sums the gradients of all ranks. Every rank calls it once per iteration, work or no work."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.grad)


def _accumulate_into(total: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None

    return hook


def learning_rate(training: Training, iteration: int) -> float:
    """Learning rate of `iteration` (from 1): linear warm-up, then a cosine from `lr` to `min_lr`."""
    warmup = training.lr_warmup_iterations
    if iteration <= warmup:
        return training.lr * iteration / warmup
    progress = (iteration - 1 - warmup) / max(1, training.iterations - warmup)
    return training.min_lr + (training.lr - training.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW on the flat master weights, with the per-token division and clipping before it."""

    def __init__(self, flat: FlatParameters, training: Training) -> None:
        self._flat, self._training = flat, training
        parts = ((flat.master[: flat.decayed], training.weight_decay), (flat.master[flat.decayed :], 0.0))
        self._parameters = [nn.Parameter(part, requires_grad=True) for part, _ in parts]
        for parameter, grad in zip(self._parameters, flat.grad.split((flat.decayed, len(flat.grad) - flat.decayed)),
                                   strict=True):  # fmt: skip
            parameter.grad = grad
        self._adamw = torch.optim.AdamW(
            [
                {"params": [parameter], "weight_decay": decay}
                for parameter, (_, decay) in zip(self._parameters, parts, strict=True)
                if parameter.numel()
            ],
            lr=training.lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            fused=True,
        )

    def step(self, token_count: int, lr: float) -> Tensor:
        """Divides the summed gradients by the global token count, clips, updates; returns the norm before clipping.

        The norm stays on the device: reading it would wait for the GPU in the middle of the step.
        """
        norm = torch.linalg.vector_norm(self._flat.grad) / token_count
        scale = torch.full_like(norm, 1.0 / token_count)
        if self._training.clip_grad > 0:
            scale = scale * (self._training.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        self._flat.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._flat.publish()
        return norm
