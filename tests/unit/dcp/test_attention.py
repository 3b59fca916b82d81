"""The attention backends on one rank: against the definition, and against the known faults."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dcpbench.dcp.attention import backend
from dcpbench.dcp.attention.gathered import GatheredAttention
from dcpbench.dcp.attention.kernels import REFERENCE, SDPA, within_32_bits
from dcpbench.dcp.attention.layout import device_layout
from dcpbench.dcp.attention.reference import causal_attention, packed_attention
from dcpbench.dcp.attention.transport import CollectiveTransport
from dcpbench.dcp.groups import CpGroup
from dcpbench.dcp.packing import attention_layout
from dcpbench.errors import PreflightError

CPU = torch.device("cpu")
ALONE = CpGroup(1, 0, None)


def layout_of(lengths: list[int], padded: list[int], rows: int | None = None):
    return device_layout(attention_layout(np.array(lengths), np.array(padded), rows=rows), CPU)


def leaves(rows: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, h, dim, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def test_the_reference_is_softmax_attention() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(5, 1, 4, dtype=torch.float64) for _ in range(3))
    got = causal_attention(q, k, v)
    for row in range(5):
        weights = torch.softmax(k[: row + 1, 0] @ q[row, 0] / 2.0, 0)
        torch.testing.assert_close(got[row, 0], weights @ v[: row + 1, 0])


def attend(q, k, v, layout, kernel=SDPA):
    return GatheredAttention(layout, ALONE, kernel, CollectiveTransport())(q, k, v)


@pytest.mark.parametrize("kernel", [SDPA, REFERENCE])
def test_output_and_gradients_match_the_definition(kernel) -> None:
    lengths, padded = [1, 37, 12, 5], [1, 40, 12, 8]
    mine, exact = leaves(61), leaves(61)
    grad = torch.randn(61, 4, 8, dtype=torch.float64)
    got = attend(*mine, layout_of(lengths, padded), kernel)
    got.backward(grad)
    expected = packed_attention(*exact, lengths, padded)
    expected.backward(grad)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(mine, exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a29_padding_full_of_large_numbers_changes_nothing() -> None:
    lengths, padded = [5, 6], [8, 8]
    clean, dirty = leaves(16), leaves(16)
    pad = [5, 6, 7, 14, 15]
    with torch.no_grad():
        for leaf in dirty:
            leaf[pad] = 1e4
    a = attend(*clean, layout_of(lengths, padded))
    b = attend(*dirty, layout_of(lengths, padded))
    assert torch.equal(a, b)


def test_a30_empty_documents_do_not_reach_the_kernel() -> None:
    out = attend(*leaves(2), layout_of([0, 1, 0, 1], [0, 1, 0, 1]))
    assert out.shape == (2, 4, 8)


def test_a35_rows_behind_the_last_offset_are_exactly_zero() -> None:
    inputs = leaves(100)
    with torch.no_grad():
        for leaf in inputs:
            leaf[90:] = float("nan")
    out = attend(*inputs, layout_of([40, 50], [40, 50], rows=100))
    grad = torch.randn_like(out)
    grad[90:] = float("nan")
    out.backward(grad)
    assert torch.equal(out[90:], torch.zeros(10, 4, 8, dtype=torch.float64))
    for leaf in inputs:
        assert leaf.grad is not None
        assert (leaf.grad[90:] == 0).all()
        assert leaf.grad.isfinite().all()


def test_a_pack_of_padding_only_gives_zeros_and_zero_gradients() -> None:
    inputs = leaves(4)
    out = attend(*inputs, layout_of([0], [4]))
    out.sum().backward()
    assert (out == 0).all()
    assert all((leaf.grad == 0).all() for leaf in inputs if leaf.grad is not None)


def test_a31_offsets_beyond_32_bits_are_made_contiguous() -> None:
    # Meta tensors have shapes and strides but no memory.
    wide = torch.empty(131073, 16384, device="meta")[:, :8]
    fits = torch.empty(131072, 16384, device="meta")[:, :8]
    assert within_32_bits(wide).is_contiguous()
    assert within_32_bits(fits) is fits


def test_a34_a_head_no_fused_kernel_serves_is_refused_on_cuda() -> None:
    with pytest.raises(PreflightError, match="head dimension 512"):
        backend.check("auto", torch.device("cuda"), torch.bfloat16, 512)
    with pytest.raises(PreflightError, match="flash needs CUDA"):
        backend.check("flash", CPU, torch.float32, 64)
    with pytest.raises(PreflightError, match="unknown backend 'flush'"):
        backend.check("flush", CPU, torch.float32, 64)
    with pytest.raises(PreflightError, match="needs CUDA"):
        backend.check("symmetric/sdpa", CPU, torch.float32, 64)
    assert backend.check("auto", torch.device("cuda"), torch.bfloat16, 128) == ("auto", "auto")
    assert backend.check("collective/sdpa", CPU, torch.float32, 128) == ("collective", "sdpa")


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = leaves(6)
    with pytest.raises(ValueError, match="for 5 rows"):
        attend(q, k, v, layout_of([5], [5]))
    with pytest.raises(ValueError, match="do not fit"):
        attend(q[:, :3], k, v, layout_of([6], [6]))


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([256] * 32, "flash"),  # short keys: nothing to win
        ([4096], "flash"),  # long keys, but so little work that the host's time decides
        ([4096] * 2, "cudnn"),
        ([8192], "cudnn"),
        ([65_536], "cudnn"),
        ([65_537], "flash"),  # longer than cuDNN's fused backward
    ],
)
def test_auto_takes_the_kernel_that_the_microbatch_wants(lengths: list[int], expected: str) -> None:
    sizes = backend.Sizes(16, 16, 128, 70_000)
    chosen = backend.GatheredBackend(
        (_Named("flash"), _Named("cudnn")),  # type: ignore[arg-type]
        CollectiveTransport(),
        sizes,
        CPU,
        torch.bfloat16,
    )
    array = np.array(lengths)
    assert chosen.kernel_for(attention_layout(array, array)).name == expected


def test_cudnn_alone_refuses_what_it_cannot_serve() -> None:
    chosen = backend.GatheredBackend(
        (_Named("cudnn"),),  # type: ignore[arg-type]
        CollectiveTransport(),
        backend.Sizes(1, 1, 64, 70_000),
        CPU,
        torch.bfloat16,
    )
    array = np.array([65_537])
    with pytest.raises(PreflightError, match="up to 65536 tokens; the longest here has 65537"):
        chosen.kernel_for(attention_layout(array, array))


def test_gpus_that_cannot_reach_each_other_fall_back_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 2)
    assert backend._no_mapped_memory(2) is None
    reason = "GPU 0 cannot access the memory of GPU 2"
    assert backend._no_mapped_memory(4) == reason
    groups = SimpleNamespace(largest=4, world=4, connect=lambda: None)
    arguments = (groups, backend.Sizes(1, 1, 64, 8), torch.device("cuda", 0), torch.bfloat16)
    assert backend._transport("auto", *arguments).name == "collective"  # type: ignore[arg-type]
    with pytest.raises(PreflightError, match=f"{reason}; choose collective"):
        backend._transport("symmetric", *arguments)  # type: ignore[arg-type]
