"""Flat buffers: segments, shards, and what reaches a gradient buffer."""

import pytest
import torch

from dcpbench import spec
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import ALIGNMENT, FlatParameters

CPU = torch.device("cpu")
MODEL = spec.Model(flavour="classic", layers=3, hidden_size=20, ffn_hidden_size=28, tie_embeddings=False, vocab_size=37)


def flat_of(dtype: torch.dtype = torch.float32, shards: int = 1, shard: int = 0) -> FlatParameters:
    with torch.device("meta"):
        model = GPT(MODEL, 50)
    flat = FlatParameters(model, dtype, CPU, torch.float32, shards=shards, shard=shard)
    flat.fill(lambda weights: initialise(weights, MODEL, 5))
    return flat


def test_segments_follow_each_other_and_each_block_is_one() -> None:
    flat = flat_of()
    names = [segment.name for segment in flat.segments]
    assert names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "output", "vectors"]
    assert [segment.start for segment in flat.segments[1:]] == [segment.stop for segment in flat.segments[:-1]]
    assert flat.segments[-1].stop == len(flat.grad)
    for name, part in flat.slices.items():
        (home,) = [s for s in flat.segments if s.start <= part.start and part.stop <= s.stop]
        assert part.start % ALIGNMENT == 0
        if "bias" in name or "norm" in name:
            assert home.name == "vectors"
        elif name.startswith("blocks"):
            assert name.startswith(home.name + ".")
    assert [piece.decayed for piece in flat.pieces] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pieces_of_all_shards_are_the_whole(dtype: torch.dtype) -> None:
    shards = 3
    parts = [flat_of(dtype, shards, shard) for shard in range(shards)]
    whole = torch.zeros(len(parts[0].grad))
    seen = torch.zeros(len(parts[0].grad))
    for shard, flat in enumerate(parts):
        assert sum(len(piece.weight) for piece in flat.pieces) == len(flat.grad) // shards
        for segment, piece in zip(flat.segments, flat.pieces, strict=True):
            assert piece.decayed == (segment.name != "vectors")
            place = segment.shard(shards, shard)
            assert (place.stop - place.start) % ALIGNMENT == 0
            whole[place] = piece.weight
            seen[place] += 1
            assert torch.equal(piece.compute, piece.weight.to(dtype))
            assert piece.grad.data_ptr() == flat.grad[place].data_ptr()
    assert (seen == 1).all()
    expected = flat_of()
    for name, part in parts[0].slices.items():
        assert torch.equal(whole[part], expected.master[expected.slices[name]])
        assert torch.equal(parts[1].compute[part], whole[part].to(dtype))


def test_shards_hold_no_more_than_their_part() -> None:
    whole, part = flat_of(torch.bfloat16), flat_of(torch.bfloat16, 4, 2)
    assert part.weight_bytes == len(part.grad) * 2 + len(part.grad) * 4 // 4
    assert whole.weight_bytes == len(whole.grad) * 6
    assert sum(piece.weight.nbytes for piece in part.pieces) == len(part.grad)


def test_the_optimizer_updates_what_the_model_reads() -> None:
    flat = flat_of(torch.bfloat16, 2, 1)
    for piece in flat.pieces:
        piece.weight.add_(1)
    flat.publish()
    own = torch.cat([piece.compute for piece in flat.pieces])
    assert torch.equal(own, torch.cat([piece.weight for piece in flat.pieces]).bfloat16())
    for segment in flat.segments:
        theirs = segment.shard(2, 0)
        assert flat.compute[theirs].abs().max() < 1.5  # not this rank's to change: norms were one, the rest small
        assert flat.compute[segment.shard(2, 1)].min() > 0.5
