"""Sketches of gradients: linear, the same whoever holds which part, and good enough to measure a difference."""

import numpy as np
import pytest
import torch
from torch import nn

from dcpbench.worker import sketch as module
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.sketch import BUCKETS, GradientSketcher, compare, own_parts


def flat(shards: int = 1, shard: int = 0) -> FlatParameters:
    model = nn.Module()
    model.embedding = nn.Linear(40, 50)
    model.blocks = nn.ModuleList([nn.Linear(40, 70), nn.Linear(70, 40)])
    model.output = nn.Linear(40, 50, bias=False)
    return FlatParameters(
        model, torch.float32, torch.device("cpu"), torch.float32, shards=shards, shard=shard
    )  # fmt: skip


def drawn(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def sketched(values: torch.Tensor, parts: int = 1, shards: int = 1) -> torch.Tensor:
    """The whole sketch, added up over what each of `parts` ranks sees."""
    total = None
    for rank in range(parts):
        one = flat(shards, rank % shards)
        one.grad.copy_(values)
        table = GradientSketcher(one, rank, parts)()
        total = table if total is None else total + table
    assert total is not None
    return total


@pytest.mark.parametrize("chunk", [128, 512, module.CHUNK])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_ranks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, parts: int, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    values = drawn(flat().grad, 1)
    torch.testing.assert_close(sketched(values, parts), sketched(values), rtol=1e-6, atol=1e-6)


def test_sharded_gradients_are_looked_at_where_they_are() -> None:
    values = drawn(flat(2).grad, 2)
    whole = flat(2)
    whole.shards = 1
    whole.grad.copy_(values)
    torch.testing.assert_close(sketched(values, 2, 2), GradientSketcher(whole, 0, 1)(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_element_belongs_to_one_rank(shards: int) -> None:
    counts = np.zeros(len(flat(shards).grad), dtype=int)
    for rank in range(3):
        one = flat(shards, rank % shards)
        for number, part in own_parts(one, rank, 3):
            counts[part] += 1
            assert one.segments[number].start <= part.start < part.stop <= one.segments[number].stop
    assert (counts == 1).all()


def test_a_sketch_is_linear_and_holds_the_norm() -> None:
    a, b = drawn(flat().grad, 3), drawn(flat().grad, 4)
    one, other, both = sketched(a), sketched(b), sketched(a - 2 * b)
    torch.testing.assert_close((one - 2 * other)[:, :-1], both[:, :-1], rtol=1e-4, atol=1e-4)
    assert float(one[:, -1].sum()) == pytest.approx(float(a.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("chunk", [512, module.CHUNK])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_the_size_of_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, size: float, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    one = flat()
    names = tuple(segment.name for segment in one.segments)
    found = []
    for seed in range(20):
        a = drawn(one.grad, seed).double()
        b = a + size * a.norm() * torch.nn.functional.normalize(drawn(one.grad, 100 + seed).double(), dim=0)
        result = compare(sketched(a.float()), sketched(b.float()), names)
        assert result.difference is not None
        found.append(result.difference)
    # A sketch of a float32 gradient adds up in float64: a difference of a millionth is not lost in it.
    assert np.mean(found) == pytest.approx(size, rel=0.1)
    assert np.abs(np.array(found) / size - 1).max() < 0.5


def test_equal_gradients_differ_nowhere_and_a_wrong_segment_is_named() -> None:
    one = flat()
    names = tuple(segment.name for segment in one.segments)
    values = drawn(one.grad, 5)
    equal = compare(sketched(values), sketched(values), names)
    assert (equal.difference, equal.segment) == (0.0, None)
    assert equal.norms["baseline"] == equal.norms["dcp"] == pytest.approx(float(values.norm()), rel=1e-6)
    assert equal.sketches["dcp"] == equal.sketches["baseline"]
    assert len(equal.sketches["dcp"]) == BUCKETS
    wrong = values.clone()
    block = next(segment for segment in one.segments if segment.name == "blocks.1")
    block.of(wrong).mul_(1.01)
    found = compare(sketched(values), sketched(wrong), names)
    assert found.segment == "blocks.1"
    assert found.difference == pytest.approx(0.01 * float(block.of(values).norm() / values.norm()), rel=0.4)


def test_a_gradient_of_nothing_has_no_relative_difference() -> None:
    zero = sketched(torch.zeros_like(flat().grad))
    assert compare(zero, zero, ("a",) * len(zero)).difference is None
