"""Timing and comparing on a GPU: what the worker's benchmark scripts share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpbench.worker.linear import add_bias_gradient

BF16 = torch.bfloat16


@dataclass
class Row:
    part: str
    shape: str
    ours: Callable[[], object] | None
    plain: Callable[[], object] | None = None
    amount: float = 0.0
    """Bytes, or operations with unit TFLOP/s."""
    unit: str = "GB/s"
    errors: tuple[float, float | None] | None = None
    """(ours, plain)."""


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def median_ms(call: Callable[[], object], seconds: float = 0.25) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    repeats = max(3, min(50, int(seconds / max(1e-6, time.perf_counter() - began))))
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the host runs ahead, so that it is not what is measured
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def pair(
    forward_name: str,
    backward_name: str,
    x: Tensor,
    grads: list[Tensor],
    *,
    ours: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
    ours_backward: Callable[[Tensor, list[Tensor]], Tensor],
    plain: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
    bias: Tensor | None = None,
    shape: str = "",
) -> Iterator[Row]:
    """A forward row and a backward row of a function of x; the plain backward adds to `bias` by a second pass."""
    exact, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
    expected, graph = together(plain(exact)), plain(leaf)
    torch.autograd.backward(plain(exact), [grad.double() for grad in grads])
    assert exact.grad is not None
    errors = relative(together(ours(x.clone())), expected), relative(together(graph), expected)
    work = x.clone()
    size = 2.0 * x.nbytes if isinstance(graph, tuple) else 1.0 * (x.nbytes + graph.nbytes)
    shape = shape or "{} x {}".format(*x.shape)
    yield Row(forward_name, shape, lambda: ours(work), lambda: plain(leaf), size, errors=errors)

    def plain_backward() -> Tensor:
        (found,) = torch.autograd.grad(graph, leaf, grads, retain_graph=True)
        add_bias_gradient(bias, found)
        return found

    errors = relative(ours_backward(x, grads), exact.grad), relative(plain_backward(), exact.grad)
    size = 2.0 * x.nbytes if isinstance(graph, tuple) else 1.0 * (2 * x.nbytes + graph.nbytes)
    yield Row(backward_name, shape, lambda: ours_backward(x, grads), plain_backward, size, errors=errors)


def together(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out.detach() if isinstance(out, Tensor) else torch.cat([part.detach() for part in out], dim=1)


def show(row: Row) -> None:
    ours = median_ms(row.ours) if row.ours else 0.0
    plain = median_ms(row.plain) if row.plain else None
    rate = row.amount / ours / (1e9 if row.unit == "TFLOP/s" else 1e6)
    errors = "" if row.errors is None else f"{row.errors[0]:.1e}"
    if row.errors is not None and row.errors[1] is not None:
        errors += f", {row.errors[1]:.1e}"
    print(
        f"{row.part:58} {row.shape:26} {ours:8.3f} {'' if plain is None else f'{plain:.3f}':>8} "
        f"{'' if plain is None else f'{plain / ours:.2f}':>5} {rate:8,.0f} {row.unit:7} {errors}",
        flush=True,
    )
