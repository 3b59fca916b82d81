"""Runs under torchrun on GPUs: every backend on packs that break things, against one GPU in float32.

Writes a list of {"backend", "case", "size", "errors", "scale", "repeatable"} to the file named in argv:
`errors` are the relative errors of output and gradients of q, k and v, `scale` the largest deviation of the
projection on the expected values from 1, which rounding averages out of and a wrong factor does not.
"""

import json
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dcpbench.dcp.attention import backend, cudnn
from dcpbench.dcp.attention.reference import causal_attention
from dcpbench.dcp.groups import RuntimeGroups
from dcpbench.dcp.packing import attention_layout, offsets_of, ranges, segments_of

CASES = {
    # name: (heads, kv_heads, dim, lengths)
    "mixed": (16, 16, 128, [701, 13, 2999, 5, 1, 64, 4097, 128]),
    "grouped": (8, 2, 128, [1, 1023, 2048, 777]),
    "narrow": (8, 8, 64, [333, 1, 4095, 90]),
    "wide": (4, 2, 256, [901, 64, 3]),
    "thousands": (4, 4, 64, [1 + i % 9 for i in range(3000)]),
    "long": (4, 4, 64, [14_001, 300]),
    "beyond 2^17 tokens": (2, 1, 64, [(1 << 17) + 9]),
    "tail": (8, 2, 128, [1, 515, 1022]),
}
TAIL = {"tail": 40}
"""Rows that a rank has behind its sequences."""

EXPECTED: dict[tuple[str, int], list[torch.Tensor]] = {}
"""By case and padded rows: every backend is given the same values."""


def measure(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    got, want = got.double(), want.double()
    norm = want.norm().clamp(min=1e-30)
    return float((got - want).norm() / norm), abs(float((got * want).sum() / norm**2) - 1.0)


def expected(q, k, v, grad, lengths, padded):
    """Output and gradients of every row in float32, on one GPU: the definition, a block of queries at a time."""
    outs = [torch.zeros_like(x, dtype=torch.float32) for x in (q, q, k, v)]
    for start, length in zip(offsets_of(padded).tolist(), lengths.tolist(), strict=False):
        rows = slice(start, start + length)
        keys, values = (x[rows].float().requires_grad_() for x in (k, v))
        for first in range(0, length, 1024):
            last = min(first + 1024, length)
            block = slice(start + first, start + last)
            queries = q[block].float().requires_grad_()
            out = causal_attention(queries, keys[:last], values[:last])
            outs[0][block] = out.detach()
            outs[1][block], *grads = torch.autograd.grad(out, (queries, keys, values), grad[block].float())
            outs[2][rows] += grads[0]
            outs[3][rows] += grads[1]
    return outs


def run(name: str, case: str, size: int, groups: RuntimeGroups, device: torch.device) -> dict[str, object] | None:
    heads, kv_heads, dim, lengths = CASES[case]
    lengths = np.array(lengths, np.int64)
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    kernel = name.rpartition("/")[2]
    if kernel == "cudnn" and max(lengths) > cudnn.LONGEST:
        return None
    if (dim == 256 and kernel != "flash") or (name.startswith("te") and case in ("thousands", "beyond 2^17 tokens")):
        return None
    tail = TAIL.get(case, 0)
    held = int(padded.sum()) // size + tail
    chosen = backend.create(
        name, groups, backend.Sizes(heads, kv_heads, dim, held), device, torch.bfloat16,
        deterministic=not name.startswith("te"),
    )  # fmt: skip
    # The last ranks of the domain; the others have nothing to do. On one rank each: all do the same.
    first = groups.world - size if size > 1 else groups.rank
    if not first <= groups.rank < first + size:
        return worst(name, case, size, [0.0] * 6, device)
    group = groups.of(first, size)
    generator = torch.Generator(device=device).manual_seed(11)
    q, k, v, grad = (
        torch.randn(int(padded.sum()), h, dim, device=device, dtype=torch.bfloat16, generator=generator)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    pieces = segments_of(lengths, padded, size, group.rank)
    rows = torch.from_numpy(ranges(offsets_of(padded)[pieces.sequence] + pieces.first, pieces.rows)).to(device)
    layout = attention_layout(lengths, padded, size, group.rank, held)
    # As the model hands them over: views of one projection.
    fused = F.pad(torch.cat((q, k, v), 1)[rows], (0, 0, 0, 0, 0, tail), value=1.0).requires_grad_()
    grad_rows = F.pad(grad[rows], (0, 0, 0, 0, 0, tail), value=1.0)

    def once() -> list[torch.Tensor]:
        attention = chosen.prepare(layout, group)
        out = attention(*fused.split((heads, kv_heads, kv_heads), 1))
        (grads,) = torch.autograd.grad(out, fused, grad_rows)
        attention.finish()
        return [out.detach(), *grads.split((heads, kv_heads, kv_heads), 1)]

    got, again = once(), once()
    key = case, int(padded.sum())
    if key not in EXPECTED:
        EXPECTED[key] = expected(q, k, v, grad, lengths, padded)
    want = EXPECTED[key]
    keep = torch.from_numpy(ranges(layout.query_starts, layout.query_counts)).to(device)
    numbers = [measure(a[keep], b[rows][keep]) for a, b in zip(got, want, strict=True)]
    differs = float(not all(torch.equal(a[keep], b[keep]) for a, b in zip(got, again, strict=True)))
    behind = [float(a[len(rows) :].abs().max()) if tail else 0.0 for a in got]  # which is to be zero
    found = [*(max(error, rest) for (error, _), rest in zip(numbers, behind, strict=True))]
    found += [max(scale for _, scale in numbers), differs]
    return worst(name, case, size, found, device)


def worst(name: str, case: str, size: int, found: list[float], device: torch.device) -> dict[str, object]:
    """Over all ranks: the errors of output and three gradients, the scale, and whether a repetition differs."""
    result = torch.tensor(found, device=device, dtype=torch.float64)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    *errors, scale, differs = result.tolist()
    return {"backend": name, "case": case, "size": size, "errors": errors, "scale": scale,
            "repeatable": differs == 0}  # fmt: skip


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    world = dist.get_world_size()
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else [
        "symmetric/flash", "collective/flash", "auto",
        *(["symmetric/cudnn", "collective/cudnn"] if find_spec("cudnn") else []),
    ]  # fmt: skip
    # Transformer Engine has no deterministic kernel for these shapes; ours must repeat bit for bit.
    torch.use_deterministic_algorithms(not any(name.startswith("te") for name in names))
    # With more than two ranks also groups that are not all of them: a pair, and one short of all.
    sizes = sorted({1, world, *((2, world - 1) if world > 2 else ())})
    blocks = []
    if any(name.startswith("te") for name in names):
        sizes = [size for size in sizes if size & (size - 1) == 0]  # its a2a divides heads among the ranks
        blocks = [(world - size, size) for size in sizes]
    groups = RuntimeGroups(sizes, device, timedelta(seconds=120), blocks=blocks)
    results = []
    for name in names:
        for case in CASES:
            for size in sizes:
                if size == 1 and name.startswith("collective"):
                    continue
                found = run(name, case, size, groups, device)
                if found is not None:
                    results.append(found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
