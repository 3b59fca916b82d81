"""Context-parallel attention: time, TFLOP/s and error of every backend, at CP 1 and over all ranks.

    torchrun --nproc-per-node 2 benchmarks/attention.py [--backends auto,collective/flash,...] [--packs 8x1024,...]
                                                         [--trace]

Prints one row per pack, CP size and backend: median device time of the forward and of the backward
in ms (whole calls between CUDA events, communication included), TFLOP/s per GPU over the causal
FLOPs of this rank, host time of a forward call, and the relative error of output and gradients
against float32 (largest sequences are checked on their first rows only). With --trace every row is followed by
the kernels of one forward and backward on the first rank: start, length and gap before, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dcpbench.dcp.attention import backend
from dcpbench.dcp.attention.kernels import SDPA
from dcpbench.dcp.attention.layout import device_layout
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import attention_layout, offsets_of, ranges, segments_of

PACKS = {
    "32x256": [256] * 32,
    "8x1024": [1024] * 8,
    "2x4096": [4096] * 2,
    "1x8192": [8192],
    "1x32768": [32768],
    "odd": [701, 13, 2999, 5, 1, 64],
}
DEFAULT = "auto,symmetric/flash,symmetric/cudnn,collective/flash,collective/cudnn"


def median_ms(call: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The host must not be what is measured: let it run ahead of the device.
        torch.cuda._sleep(5_000_000)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def host_ms(call: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    elapsed = (time.perf_counter() - started) / repeats
    torch.cuda.synchronize()
    return 1e3 * elapsed


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=DEFAULT)
    parser.add_argument("--packs", default=",".join(PACKS))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trace", action="store_true", help="list the kernels of one forward and backward")
    options = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1, world] if world > 1 else [1]
    groups = RuntimeGroups(sizes, device, timedelta(seconds=60), blocks=[(0, world)])
    longest = max(sum(PACKS[p]) for p in options.packs.split(","))
    made = {
        name: backend.create(
            name,
            groups,
            backend.Sizes(options.heads, options.kv_heads, options.dim, longest + 64),
            device,
            torch.bfloat16,
        )
        # Transformer Engine first: it must load its libraries before another program of cuDNN does.
        for name in sorted(options.backends.split(","), key=lambda name: not name.startswith("te"))
    }
    if rank == 0:
        print(f"{torch.cuda.get_device_name(device)}, {world} ranks, {options.heads}/{options.kv_heads} heads of "
              f"{options.dim}, bfloat16, torch {torch.__version__}")  # fmt: skip
        print(f"{'pack':8} {'CP':>2} {'backend':26} {'fwd ms':>8} {'TF/s':>5} {'bwd ms':>8} {'TF/s':>5} {'host ms':>8} "
              f"{'err out':>8} {'err dq':>8} {'err dkv':>8}")  # fmt: skip
    for pack in options.packs.split(","):
        for size in sizes:
            for name, chosen in made.items():
                if size == 1 and name.startswith("collective/"):
                    continue  # without communication the transports are the same
                row(pack, size, name, chosen, groups, options, device)
    dist.destroy_process_group()


def row(pack, size, name, chosen, groups, options, device) -> None:  # type: ignore[no-untyped-def]
    rank = dist.get_rank() if size > 1 else 0
    group = groups.of(0, size) if size > 1 else groups.of(dist.get_rank(), 1)
    lengths = np.array(PACKS[pack], np.int64)
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    total = int(padded.sum())
    layout = attention_layout(lengths, padded, size, rank)
    generator = torch.Generator(device=device).manual_seed(7)
    q, k, v, grad = (
        torch.randn(total, heads, options.dim, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads)
    )
    pieces = segments_of(lengths, padded, size, rank)
    rows = torch.from_numpy(ranges(offsets_of(padded)[pieces.sequence] + pieces.first, pieces.rows)).to(device)
    own = [x[rows].requires_grad_() for x in (q, k, v)]
    own_grad = grad[rows]
    attention = chosen.prepare(layout, group)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*own)

    out = attention(*own)
    grads = torch.autograd.grad(out, own, own_grad, retain_graph=False)
    attention.finish()
    errors = check(q, k, v, grad, lengths, padded, rows, out.detach(), grads) if total <= 16384 else (0.0, 0.0, 0.0)
    forward_time, host = median_ms(forward, options.repeats), host_ms(forward, options.repeats)

    def both() -> None:
        torch.autograd.grad(attention(*own), own, own_grad)
        attention.finish()

    backward_time = median_ms(both, options.repeats) - forward_time
    flops = 4.0 * options.heads * options.dim * layout.keys_per_query * float(layout.query_counts.sum())
    numbers = torch.tensor([forward_time, backward_time, host, *errors], device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    forward_time, backward_time, host, *errors = numbers.tolist()
    if dist.get_rank() == 0:
        print(f"{pack:8} {size:2} {name:26} {forward_time:8.3f} {flops / forward_time / 1e9:5.0f} "
              f"{backward_time:8.3f} {2.5 * flops / backward_time / 1e9:5.0f} {host:8.3f} {errors[0]:8.1e} "
              f"{errors[1]:8.1e} {errors[2]:8.1e}", flush=True)  # fmt: skip
    sys.stdout.flush()
    if options.trace:
        trace(both)


def trace(call: Callable[[], object]) -> None:
    """Prints the kernels of one call on the first rank, in order of their start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        torch.cuda._sleep(20_000_000)
        call()
        torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    on_device = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((e for e in on_device if "spin" not in e.name), key=lambda event: event.time_range.start)
    end = first = kernels[0].time_range.start
    for kernel in kernels:
        start, length = kernel.time_range.start, kernel.time_range.elapsed_us()
        print(f"    {start - first:10.1f} {length:9.1f} {start - end:9.1f}  {kernel.name[:110]}")
        end = max(end, start + length)


def check(q, k, v, grad, lengths, padded, rows, out, grads) -> tuple[float, float, float]:  # type: ignore[no-untyped-def]
    """Errors of this rank's rows against one rank in float32."""
    layout = device_layout(attention_layout(lengths, padded), q.device)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    selected = layout.host.key_rows is not None
    keys = [x.index_select(0, layout.key_rows) if selected else x for x in inputs[1:]]
    with torch.no_grad():
        want, saved = SDPA.forward(inputs[0], *keys, layout)
    want_q, want_k, want_v = SDPA.backward(grad.float(), saved)
    if selected:
        want_k, want_v = (
            torch.zeros_like(q[:, : x.shape[1]]).float().index_copy_(0, layout.key_rows, x) for x in (want_k, want_v)
        )
    return (
        relative(out, want[rows]),
        relative(grads[0], want_q[rows]),
        max(relative(grads[1], want_k[rows]), relative(grads[2], want_v[rows])),
    )


if __name__ == "__main__":
    main()
