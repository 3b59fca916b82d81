"""AdamW over flat buffers: one norm and one update per iteration, whatever the number of parameters."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpbench.spec import Training
from dcpbench.worker.parameters import FlatParameters


def learning_rate(training: Training, iteration: int) -> float:
    """Learning rate of `iteration` (from 1): linear warm-up, then a cosine from `lr` to `min_lr`."""
    warmup = training.lr_warmup_iterations
    if iteration <= warmup:
        return training.lr * iteration / warmup
    progress = (iteration - 1 - warmup) / max(1, training.iterations - warmup)
    return training.min_lr + (training.lr - training.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW on the float32 weights, with the per-token division and clipping before it.

    On CUDA one kernel does all of it; elsewhere torch's AdamW does, to the same result.
    """

    def __init__(self, flat: FlatParameters, training: Training) -> None:
        self._flat, self._training = flat, training
        self._steps = 0
        self._foreign = flat.foreign_gradients
        self._fused = flat.grad.is_cuda
        if self._fused:
            self._moments = [(torch.zeros_like(p.weight), torch.zeros_like(p.weight)) for p in flat.pieces]
        else:
            self._adamw = _torch_adamw(flat, training)
        self.memory_bytes = 2 * sum(piece.weight.nbytes for piece in flat.pieces)
        """What the two moments take on this rank."""

    def step(self, token_count: int, lr: float) -> Tensor:
        """Divides the summed gradients by the global token count, clips and updates; leaves the gradients zero.

        Returns the norm before clipping, on the device: reading it would wait for the GPU in the middle
        of the step. With shards it is collective.
        """
        flat, training = self._flat, self._training
        norm = self._norm() / token_count
        scale = torch.full_like(norm, 1.0 / token_count)
        if training.clip_grad > 0:
            scale = scale * (training.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        self._steps += 1
        works = []
        if not self._fused:
            self._update_by_torch(scale, lr)
        for number in range(len(flat.pieces)):
            if self._fused:
                self._update_by_kernel(number, scale, lr)
            if flat.shards > 1:
                # Sent while the next piece is updated.
                works.append(flat.collect(number))
        if flat.shards > 1:
            torch._foreach_zero_(self._foreign)
        for work in works:
            work.wait()
        return norm

    def _norm(self) -> Tensor:
        flat = self._flat
        if flat.shards == 1:
            return torch.linalg.vector_norm(flat.grad)
        squares = nn.utils.get_total_norm([piece.grad for piece in flat.pieces]).square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def _update_by_kernel(self, number: int, scale: Tensor, lr: float) -> None:
        from dcpbench.worker.kernels import adamw  # noqa: PLC0415 - Triton exists only beside CUDA

        training, piece = self._training, self._flat.pieces[number]
        first, second = self._moments[number]
        adamw.update(
            piece.weight,
            piece.grad,
            first,
            second,
            piece.compute,
            scale,
            iteration=self._steps,
            lr=lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            weight_decay=training.weight_decay if piece.decayed else 0.0,
        )

    def _update_by_torch(self, scale: Tensor, lr: float) -> None:
        for piece in self._flat.pieces:
            piece.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._flat.publish()
        for piece in self._flat.pieces:
            piece.grad.zero_()


def _torch_adamw(flat: FlatParameters, training: Training) -> torch.optim.AdamW:
    groups = []
    for piece in flat.pieces:
        parameter = nn.Parameter(piece.weight)
        parameter.grad = piece.grad
        groups.append({"params": [parameter], "weight_decay": training.weight_decay if piece.decayed else 0.0})
    betas = (training.adam_beta1, training.adam_beta2)
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.adam_eps, fused=True)
