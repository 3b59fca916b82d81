"""Runs under torchrun: attention and whole-model gradients on CP groups of several sizes against one rank.

Writes {"attention": {"<size>/<dtype>": error}, "model": {"<flavour>/<size>/<dtype>": error}} to the
file named in argv; an error is the largest ||got - expected|| / ||expected|| over outputs and
gradients.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dcpbench import spec
from dcpbench.dcp.attention.gathered import GatheredAttention
from dcpbench.dcp.attention.kernels import REFERENCE, SDPA, Kernel
from dcpbench.dcp.attention.layout import device_layout
from dcpbench.dcp.attention.reference import packed_attention
from dcpbench.dcp.attention.transport import CollectiveTransport
from dcpbench.dcp.groups import CpGroup, RuntimeGroups
from dcpbench.dcp.packing import attention_layout, offsets_of, pack_rank, ranges, segments_of
from dcpbench.dcp.workload import PaddingRule
from dcpbench.worker.lifetime import leave
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import FlatParameters

SIZES = (1, 2, 3, 4, 6, 8)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
CPU = torch.device("cpu")
ALONE = CpGroup(1, 0, None)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def random_lengths(rng: np.random.Generator, size: int) -> np.ndarray:
    """A pack with the cases that break things: one token, odd lengths, one longer than the rest."""
    lengths = np.concatenate([[1, 2 * size + 1, int(rng.integers(2000, 3200)) | 1], rng.integers(1, 300, 4)])
    rng.shuffle(lengths)
    return lengths.astype(np.int64)


def check_attention(
    size: int, group: CpGroup, members: dist.ProcessGroup | None, dtype: torch.dtype, seed: int
) -> float:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, size)
    padding = PaddingRule()
    padded = np.array([padding.pad(int(n), size) for n in lengths])
    total = int(padded.sum())
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = 4, 2, 16
    q, k, v, grad = (
        torch.randn(total, h, dim, dtype=torch.float64, generator=generator) for h in (heads, kv_heads, kv_heads, heads)
    )
    pieces = segments_of(lengths, padded, size, group.rank)
    rows = torch.from_numpy(ranges(offsets_of(padded)[pieces.sequence] + pieces.first, pieces.rows))
    layout = device_layout(attention_layout(lengths, padded, size, group.rank), CPU)
    leaves = [x[rows].to(dtype).requires_grad_() for x in (q, k, v)]
    # Whatever stands in the rows of padding must not matter.
    real = torch.zeros(total, dtype=torch.bool)
    for start, n in zip(offsets_of(padded).tolist(), lengths.tolist(), strict=False):
        real[start : start + n] = True
    with torch.no_grad():
        for leaf in leaves:
            leaf[~real[rows]] = 1e4
    out = GatheredAttention(layout, group, SDPA, CollectiveTransport())(*leaves)
    out.backward(grad[rows].to(dtype))

    if group.rank == 0:
        exact = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = packed_attention(*exact, lengths.tolist(), padded.tolist())
        expected.backward(grad)
        wanted = [expected.detach(), *(x.grad for x in exact)]
    worst = 0.0
    for index, got in enumerate((out.detach(), *(leaf.grad for leaf in leaves))):
        whole = torch.zeros(total, *got.shape[1:], dtype=dtype)
        whole[rows] = got
        if members is not None:
            dist.all_reduce(whole, group=members)
        assert torch.equal(whole[~real], torch.zeros_like(whole[~real]))
        if group.rank == 0:
            worst = max(worst, relative(whole[real], wanted[index][real]))
    return worst


class RandomSamples:
    def __init__(self, lengths: np.ndarray, vocabulary: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokens = [rng.integers(0, vocabulary, n) for n in lengths]

    def tokens(self, position: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._tokens[position][start:stop]

    def labels(self, position: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.append(self._tokens[position][1:], -100)[start:stop]


def gradients(
    model: spec.Model, dtype: torch.dtype, kernel: Kernel, pack, group: CpGroup, members: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.device("meta"):
        gpt = GPT(model, 4096)
    flat = FlatParameters(gpt, dtype, CPU, dtype)
    initialise(flat.named_master(), model, 7)
    loss = gpt(
        *(torch.from_numpy(x) for x in (pack.tokens, pack.labels, pack.positions)),
        GatheredAttention(device_layout(pack.layout, CPU), group, kernel, CollectiveTransport()),
    )
    loss.backward()
    total = loss.detach().clone()
    if members is not None:
        dist.all_reduce(flat.grad, group=members)
        dist.all_reduce(total, group=members)
    return total, flat.grad


def check_model(
    flavour: str, size: int, group: CpGroup, members: dist.ProcessGroup | None, dtype: torch.dtype, seed: int
) -> float:
    model = spec.Model(
        flavour=flavour, layers=2, hidden_size=32, ffn_hidden_size=64, attention_heads=4, kv_heads=2, vocab_size=97,
        init_std=0.2,
    )  # fmt: skip
    lengths = random_lengths(np.random.default_rng(seed), size)
    samples = RandomSamples(lengths, model.vocab_size, seed)
    positions = list(range(len(lengths)))
    pack = pack_rank(samples, positions, lengths, PaddingRule(), size, group.rank)
    loss, grad = gradients(model, dtype, SDPA, pack, group, members)
    if group.rank != 0:
        return 0.0
    whole = pack_rank(samples, positions, lengths, PaddingRule(), 1, 0)
    expected_loss, expected = gradients(model, torch.float64, REFERENCE, whole, ALONE, None)
    return max(relative(loss, expected_loss), relative(grad, expected))


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    # All but the largest work in a ring of the parent's; what the test itself adds up has groups of its own.
    groups = RuntimeGroups(SIZES, CPU, timedelta(seconds=120))
    groups.connect()
    everyone = {size: dist.new_group(list(range(size))) for size in SIZES if size > 1}
    result: dict[str, dict[str, float]] = {"attention": {}, "model": {}}
    for size in SIZES:
        if dist.get_rank() >= size:
            continue
        group, members = groups.of(0, size), everyone.get(size)
        for name, dtype in DTYPES.items():
            result["attention"][f"{size}/{name}"] = check_attention(size, group, members, dtype, 100 + size)
            for flavour in ("modern", "classic"):
                result["model"][f"{flavour}/{size}/{name}"] = check_model(
                    flavour, size, group, members, dtype, 200 + size
                )
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
