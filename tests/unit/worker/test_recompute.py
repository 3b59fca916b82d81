"""Recomputed activations change memory, not gradients."""

import pytest
import torch

from dcpbench import spec
from dcpbench.dcp.attention.reference import packed_attention
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.recompute import recomputed

CPU = torch.device("cpu")
LENGTHS = [5, 1, 9]


class Reference:
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_attention(q, k, v, LENGTHS, LENGTHS)

    def finish(self) -> None: ...


def run(flavour: str, recompute: str, finished: list[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    model = spec.Model(flavour=flavour, layers=2, hidden_size=16, ffn_hidden_size=24, vocab_size=29, init_std=0.3)
    with torch.device("meta"):
        gpt = GPT(model, 20, recompute)
    flat = FlatParameters(gpt, torch.float64, CPU, torch.float64)
    flat.fill(lambda weights: initialise(weights, model, 3))
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 29, (2, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    for _ in range(2):
        loss = gpt(tokens, labels, positions, Reference(), None if finished is None else finished.append)
        loss.backward()
    return loss.detach(), flat.grad


@pytest.mark.parametrize("flavour", ["classic", "modern"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_the_same(flavour: str, recompute: str) -> None:
    loss, grad = run(flavour, "none")
    again, grad_again = run(flavour, recompute)
    assert torch.equal(loss, again)
    torch.testing.assert_close(grad_again, grad, rtol=1e-12, atol=1e-14)
    assert int((grad != 0).sum()) > 0.9 * grad.numel() - 64 * 20


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_segments_are_finished_from_the_last(recompute: str) -> None:
    finished: list[str] = []
    run("modern", recompute, finished)
    assert finished == ["output", "blocks.1", "blocks.0"] * 2
    tied: list[str] = []
    run("classic", recompute, tied)
    assert tied == ["blocks.1", "blocks.0"] * 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_finished_block_gets_no_further_matrix_gradient(recompute: str) -> None:
    model = spec.Model(flavour="modern", layers=3, hidden_size=16, ffn_hidden_size=24, vocab_size=29, init_std=0.3)
    with torch.device("meta"):
        gpt = GPT(model, 20, recompute)
    flat = FlatParameters(gpt, torch.float32, CPU, torch.float32)
    flat.fill(lambda weights: initialise(weights, model, 3))
    parts = {segment.name: segment.of(flat.grad) for segment in flat.segments}
    at_end: dict[str, torch.Tensor] = {}
    tokens = torch.arange(sum(LENGTHS)) % 29

    def finished(name: str) -> None:
        at_end[name] = parts[name].clone()

    gpt(tokens, tokens.roll(-1), tokens, Reference(), finished).backward()
    assert set(at_end) == {"output", "blocks.0", "blocks.1", "blocks.2"}
    for name, grad in at_end.items():
        assert grad.any()
        assert torch.equal(grad, parts[name])


def test_only_the_input_is_kept() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (y,) = recomputed(lambda x: ((x.exp() * x.sin()).sum(),), x)
    assert kept == [10]
    y.backward()
    torch.testing.assert_close(x.grad, (x.exp() * (x.sin() + x.cos())).detach())
