"""The trainer's parts on one GPU, each against its plain torch version: time, rate and error.

    python benchmarks/worker_parts.py [--only WORD,WORD] [--rows 4096,8192] [--small] [--sweep]

Shapes are those of the reference model: hidden 2048, FFN 8192, 16 heads of 128, vocabulary 131072, 12 layers,
0.87 B parameters, bfloat16. Times are medians of device time in ms. Errors are relative to float64, ours and plain.
--small shrinks every shape, to try the script out; --sweep adds other block sizes of the kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worker_timing import BF16, Row, median_ms, pair, randn, relative, show

from dcpbench import spec
from dcpbench.spec import Training
from dcpbench.worker import fused, linear, model
from dcpbench.worker.fused import Rope
from dcpbench.worker.kernels import activation, adamw, cross_entropy, norm, rope
from dcpbench.worker.linear import add_bias_gradient, add_product, products_accumulate
from dcpbench.worker.loss import linear_cross_entropy, plain_losses_and_gradient
from dcpbench.worker.model import GPT
from dcpbench.worker.optimizer import Optimizer
from dcpbench.worker.parameters import FlatParameters


@dataclass(frozen=True)
class Shapes:
    hidden: int = 2048
    ffn: int = 8192
    heads: int = 16
    dim: int = 128
    vocabulary: int = 131072
    layers: int = 12
    parameters: int = 870_000_000


def weight_gradients(s: Shapes, rows: int) -> Iterator[Row]:
    for out, inner in ((s.ffn, s.hidden), (s.hidden, s.ffn), (3 * s.hidden, s.hidden)):
        yield weight_gradient(rows, out, inner)
    grad, total = randn(rows, s.ffn), torch.zeros(s.ffn, device="cuda")
    yield Row(
        "bias gradient alone (torch)", f"{rows} x {s.ffn}", lambda: add_bias_gradient(total, grad), None, grad.nbytes
    )


def weight_gradient(rows: int, out: int, inner: int) -> Row:
    x, grad = randn(rows, inner), randn(rows, out)
    ours, plain = torch.zeros(2, out, inner, device="cuda")
    expected = grad.double().T @ x.double()
    add_product(ours, grad, x)
    plain += grad.T @ x
    return Row(
        "weight gradient into float32",
        f"{rows}: {inner} -> {out}",
        lambda: add_product(ours, grad, x),
        lambda: plain.add_(grad.T @ x),
        2.0 * rows * out * inner,
        "TFLOP/s",
        (relative(ours, expected), relative(plain, expected)),
    )


def embeddings(s: Shapes, rows: int) -> Iterator[Row]:
    table = linear.Embedding(s.vocabulary, s.hidden).to("cuda", BF16)
    plain = nn.Embedding(s.vocabulary, s.hidden).to("cuda", BF16)
    table.weight.main_grad = torch.zeros(s.vocabulary, s.hidden, device="cuda")
    tokens = (torch.rand(rows, device="cuda") ** 4 * s.vocabulary).long()
    grad = randn(rows, s.hidden)

    def naive() -> None:
        plain(tokens).backward(grad)
        table.weight.main_grad.add_(plain.weight.grad)
        plain.weight.grad = None

    yield Row(
        "embedding forward and backward",
        f"{rows} rows",
        lambda: table(tokens).backward(grad),
        naive,
        8.0 * grad.numel(),
    )

    def deterministic() -> None:
        torch.use_deterministic_algorithms(True)
        table(tokens).backward(grad)
        torch.use_deterministic_algorithms(False)

    yield Row("the same, deterministic", f"{rows} rows", deterministic, None, 8.0 * grad.numel())


def cross_entropies(s: Shapes, rows: int, sweep: bool) -> Iterator[Row]:
    logits = randn(rows, s.vocabulary, scale=3.0)
    labels = torch.randint(0, s.vocabulary, (rows,), device="cuda")
    few = logits[:64].double().requires_grad_()
    F.cross_entropy(few, labels[:64], reduction="sum").backward()
    assert few.grad is not None
    standard = cross_entropy.BLOCK, cross_entropy.WARPS
    for sizes in (standard, *(((4096, 8), (4096, 16), (8192, 32), (16384, 32), (32768, 32)) if sweep else ())):
        cross_entropy.BLOCK, cross_entropy.WARPS = sizes
        yield cross_entropy_row(logits, labels, few.grad, "block {} warps {}".format(*sizes), sizes == standard)
    cross_entropy.BLOCK, cross_entropy.WARPS = standard


def cross_entropy_row(logits: Tensor, labels: Tensor, expected: Tensor, sizes: str, compared: bool) -> Row:
    work, losses = logits.clone(), torch.empty(len(logits), device="cuda")
    cross_entropy.replace_by_gradient(work, labels, losses, -100)
    error = relative(work[: len(expected)], expected)
    other = None
    if compared:
        also = logits[: len(expected)].clone()
        plain_losses_and_gradient(also, labels[: len(expected)], losses[: len(expected)])
        other = relative(also, expected)
    work.copy_(logits)
    return Row(
        f"cross-entropy over logits, {sizes}",
        "{} x {}".format(*logits.shape),
        lambda: cross_entropy.replace_by_gradient(work, labels, losses, -100),
        (lambda: plain_losses_and_gradient(work, labels, losses)) if compared else None,
        2.0 * logits.nbytes,
        errors=(error, other),
    )


def heads_of_vocabulary(s: Shapes, rows: int) -> Iterator[Row]:
    weight = randn(s.vocabulary, s.hidden, scale=0.02).requires_grad_()
    weight.main_grad = torch.zeros(s.vocabulary, s.hidden, device="cuda")
    hidden = randn(rows, s.hidden).requires_grad_()
    labels = torch.randint(0, s.vocabulary, (rows,), device="cuda")

    def ours() -> Tensor:
        hidden.grad = None
        loss = linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        return loss

    def plain() -> Tensor:
        hidden.grad = None
        loss = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
        loss.backward()
        weight.main_grad.add_(weight.grad)
        weight.grad = None
        return loss

    one, two = ours().item(), plain().item()
    yield Row(
        f"output projection and loss, both ways (losses differ by {abs(one / two - 1):.1e})",
        f"{rows} x {s.hidden} x {s.vocabulary}",
        ours,
        plain,
        6.0 * rows * s.hidden * s.vocabulary,
        "TFLOP/s",
    )


def optimizers(s: Shapes) -> Iterator[Row]:
    count = s.parameters // 64 * 64
    weight, grad, first, second = (torch.zeros(count, device="cuda") for _ in range(4))
    compute = torch.zeros(count, device="cuda", dtype=BF16)
    scale = torch.tensor(0.5, device="cuda")
    step = {"iteration": 10, "lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    parameter = nn.Parameter(weight)
    parameter.grad = grad
    reference = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)

    def plain() -> None:
        grad.mul_(scale)
        reference.step()
        compute.copy_(weight)
        grad.zero_()

    yield Row(
        "AdamW with scaling, publishing, zeroing",
        f"{count / 1e9:.2f} B",
        lambda: adamw.update(weight, grad, first, second, compute, scale, **step),
        plain,
        34.0 * count,
    )
    grad.normal_()
    exact = sum(float(part.double().square().sum()) for part in grad.split(1 << 26)) ** 0.5
    got = float(torch.linalg.vector_norm(grad))
    yield Row(
        "gradient norm",
        f"{count / 1e9:.2f} B",
        lambda: torch.linalg.vector_norm(grad),
        None,
        4.0 * count,
        errors=(abs(got / exact - 1), None),
    )


def norms(s: Shapes, rows: int, sweep: bool) -> Iterator[Row]:
    standard = norm.PROGRAMS
    for centred in (True, False):
        yield from norm_rows(s, rows, centred)
        for programs in (1, 3, 4, 8) if sweep else ():
            norm.PROGRAMS = programs
            _, backward = norm_rows(s, rows, centred)
            backward.part += f", {programs} programs"
            yield backward
        norm.PROGRAMS = standard


def norm_rows(s: Shapes, rows: int, centred: bool) -> tuple[Row, Row]:
    x, branch, grad_normed, grad_total = (randn(rows, s.hidden) for _ in range(4))
    weight, bias = randn(2, s.hidden)
    weight_sum, bias_sum, branch_sum = torch.zeros(3, s.hidden, device="cuda")

    def forward(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        total = leaves[0] + leaves[1]
        if total.dtype == torch.float64:
            total = total + (total.detach().to(BF16).double() - total.detach())  # rounded as it is stored
        return total, apply_norm(total, leaves[2], leaves[3], centred)

    exact = [t.double().requires_grad_() for t in (x, branch, weight, bias)]
    exact_graph = forward(exact)
    torch.autograd.backward(exact_graph, (grad_total.double(), grad_normed.double()))
    assert exact[0].grad is not None
    leaves = [t.clone().requires_grad_() for t in (x, branch, weight, bias)]
    graph = forward(leaves)
    shift = bias if centred else None
    total, normed, means, scales = norm.add_norm(x, branch, None, weight, shift, 1e-5, centred)

    def ours() -> Tensor:
        return norm.add_norm_backward(
            grad_normed, grad_total, (total, means, scales), weight, centred, weight_sum,
            bias_sum if centred else None, branch_sum,
        )  # fmt: skip

    def plain() -> Tensor:
        wanted = leaves if centred else leaves[:3]
        found = torch.autograd.grad(graph, wanted, (grad_total, grad_normed), retain_graph=True)
        weight_sum.add_(found[2])
        if centred:
            bias_sum.add_(found[3])
        add_bias_gradient(branch_sum, found[1])
        return found[0]

    name, shape = "LayerNorm" if centred else "RMSNorm", f"{rows} x {s.hidden}"
    return (
        Row(
            f"addition and {name}, forward",
            shape,
            lambda: norm.add_norm(x, branch, None, weight, shift, 1e-5, centred),
            lambda: forward(leaves),
            4.0 * x.nbytes,
            errors=(relative(normed, exact_graph[1].detach()), relative(graph[1].detach(), exact_graph[1].detach())),
        ),
        Row(
            f"addition and {name}, backward with sums",
            shape,
            ours,
            plain,
            4.0 * x.nbytes,
            errors=(relative(ours(), exact[0].grad), relative(plain(), exact[0].grad)),
        ),
    )


def apply_norm(x: Tensor, weight: Tensor, bias: Tensor, centred: bool) -> Tensor:
    if centred:
        return F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[1:], weight, 1e-5)


def activations(s: Shapes, rows: int) -> Iterator[Row]:
    bias, shift = torch.zeros(s.ffn, device="cuda"), torch.zeros(s.ffn, device="cuda", dtype=BF16)
    yield from pair(
        "GELU, forward",
        "GELU, backward with the bias",
        randn(rows, s.ffn),
        [randn(rows, s.ffn)],
        ours=lambda x: activation.gelu(x, shift),
        ours_backward=lambda x, grads: activation.gelu_backward(grads[0], x, shift, bias),
        plain=lambda x: F.gelu(x, approximate="tanh"),
        bias=bias,
    )
    yield from pair(
        "SwiGLU, forward",
        "SwiGLU, backward",
        randn(rows, 2 * s.ffn),
        [randn(rows, s.ffn)],
        ours=activation.swiglu,
        ours_backward=lambda x, grads: activation.swiglu_backward(grads[0], x),
        plain=lambda x: F.silu(x.chunk(2, dim=1)[0]) * x.chunk(2, dim=1)[1],
    )


def rotations(s: Shapes, rows: int) -> Iterator[Row]:
    for kv_heads, rotated in ((s.heads, False), (s.heads, True), (s.heads // 4, True)):
        yield from rotation(s, rows, kv_heads, rotated)


def rotation(s: Shapes, rows: int, kv_heads: int, rotated: bool) -> Iterator[Row]:
    total = s.heads + 2 * kv_heads
    positions = torch.arange(rows, device="cuda")
    ropes = {dtype: Rope(positions, s.dim, 1e4, dtype) for dtype in (torch.float32, BF16, torch.float64)}
    angles = (ropes[torch.float32].cos, ropes[torch.float32].sin) if rotated else None
    bias = None if rotated else torch.zeros(total * s.dim, device="cuda")
    grad_kv = randn(rows, 2, kv_heads, s.dim)

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.view(rows, total, s.dim).split((s.heads, kv_heads, kv_heads), dim=1)
        return (ropes[x.dtype](q), ropes[x.dtype](k), v) if rotated else (q, k, v)

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        if angles is not None:
            rope.rotate(x.view(rows, total, s.dim), s.heads + kv_heads, *angles)
        return x.view(rows, total, s.dim).split((s.heads, kv_heads, kv_heads), dim=1)

    yield from pair(
        f"heads {'rotated' if rotated else 'as they are'}, forward",
        f"heads {'rotated' if rotated else 'with the bias'}, backward",
        randn(rows, total * s.dim),
        [randn(rows, s.heads, s.dim), grad_kv[:, 0], grad_kv[:, 1]],
        ours=ours,
        ours_backward=lambda x, grads: rope.join(grads[0], grads[1], grads[2], angles, bias).flatten(1),
        plain=plain,
        bias=bias,
        shape=f"{rows} x ({s.heads} + 2 x {kv_heads}) x {s.dim}",
    )


class OneSequence:
    """Causal attention over all rows as one sequence, by torch."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)

    def finish(self) -> None: ...


def models(s: Shapes, rows: int) -> None:
    """Whole forward and backward passes of the model, kernels on and off, and with recomputation."""
    print(f"\nmodel of {s.layers} layers, {rows} rows as one sequence, bfloat16")
    print("flavour  kernels  recompute  device ms   host ms  TFLOP/s  peak GiB  optimizer ms")
    served = linear.kernels_serve
    for flavour in ("classic", "modern"):
        for kernels, recompute in ((True, "none"), (False, "none"), (True, "selective"), (True, "full")):
            for module in (fused, linear, model):
                module.kernels_serve = served if kernels else not_served
            config = spec.Model(
                flavour=flavour, layers=s.layers, hidden_size=s.hidden, ffn_hidden_size=s.ffn, attention_heads=s.heads,
                vocab_size=s.vocabulary, tie_embeddings=True,
            )  # fmt: skip
            print(
                f"{flavour:8} {'on' if kernels else 'off':8} {recompute:10}{one_model(config, rows, recompute)}",
                flush=True,
            )
            gc.collect()
            torch.cuda.empty_cache()
    for module in (fused, linear, model):
        module.kernels_serve = served


def not_served(x: Tensor) -> bool:
    return False


def one_model(config: spec.Model, rows: int, recompute: spec.Recompute) -> str:
    with torch.device("meta"):
        gpt = GPT(config, rows, recompute)
    flat = FlatParameters(gpt, BF16, torch.device("cuda"), torch.float32)
    flat.master.normal_(0.0, 0.02)
    flat.publish()
    optimizer = Optimizer(flat, Training())
    tokens, labels = torch.randint(0, config.vocab_size, (2, rows), device="cuda")
    positions = torch.arange(rows, device="cuda")

    def run() -> None:
        gpt(tokens, labels, positions, OneSequence()).backward()

    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated() / 2**30
    device_ms = median_ms(run)
    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - began))
    per_token, per_square = model.flops(config)
    rate = (per_token * rows + per_square * rows**2) / device_ms / 1e9
    step_ms = median_ms(lambda: optimizer.step(rows, 1e-4))
    return f" {device_ms:9.2f} {statistics.median(host):9.2f} {rate:8.0f} {peak:9.2f} {step_ms:13.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", default="4096,8192")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    s = Shapes(256, 512, 4, 64, 5000, 2, 1_000_000) if options.small else Shapes()
    wanted = [word for word in options.only.split(",") if word]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"addmm accumulates in float32: {products_accumulate(torch.device('cuda', 0), BF16, torch.float32)}")
    print(f"{'part':58} {'shape':26} {'ours':>8} {'plain':>8} {'gain':>5} {'rate':>14}  errors (ours, plain)")
    parts: dict[str, Callable[[int], Iterator[Row]]] = {
        "weight": lambda rows: weight_gradients(s, rows),
        "embedding": lambda rows: embeddings(s, rows),
        "entropy": lambda rows: cross_entropies(s, min(rows, 4096), options.sweep),
        "head": lambda rows: heads_of_vocabulary(s, rows),
        "norm": lambda rows: norms(s, rows, options.sweep),
        "activation": lambda rows: activations(s, rows),
        "rope": lambda rows: rotations(s, rows),
        "optimizer": lambda _: optimizers(s),
    }
    for rows in map(int, options.rows.split(",")):
        for name, part in parts.items():
            if not wanted or name in wanted:
                for row in part(rows):
                    show(row)
                gc.collect()
                torch.cuda.empty_cache()
        if not wanted or "model" in wanted:
            models(s, rows)


if __name__ == "__main__":
    main()
