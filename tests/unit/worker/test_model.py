"""The model's initial weights, positions and FLOP count."""

import pytest
import torch

from dcpbench import spec
from dcpbench.worker.fused import Rope
from dcpbench.worker.model import GPT, flops, initialise
from dcpbench.worker.parameters import FlatParameters

CPU = torch.device("cpu")


def weights(model: spec.Model, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        gpt = GPT(model, 64)
    flat = FlatParameters(gpt, torch.float32, CPU, torch.float32)
    initialise(flat.named_master(), model, seed)
    return flat.named_master()


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    model = spec.Model(flavour="modern", layers=2)
    one, same, other = weights(model, 1), weights(model, 1), weights(model, 2)
    deeper = weights(model.model_copy(update={"layers": 3}), 1)
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        if weight.ndim > 1:
            assert not torch.equal(weight, other[name])
            if "out" not in name:
                assert torch.equal(weight, deeper[name])
        else:
            assert (weight == float("norm" in name)).all()


def test_residual_projections_start_smaller() -> None:
    model = spec.Model(layers=8, hidden_size=128, ffn_hidden_size=512)
    found = weights(model, 3)
    assert found["blocks.0.ffn_in.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert found["blocks.0.ffn_out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_classic_has_biases_positions_and_tied_embeddings_and_modern_has_none() -> None:
    classic = weights(spec.Model(flavour="classic"), 1)
    modern = weights(spec.Model(flavour="modern"), 1)
    assert "output.weight" not in classic
    assert "output.weight" in modern
    assert "position_embedding.weight" in classic
    assert "blocks.0.qkv.bias" in classic
    assert not any(name.endswith("bias") for name in modern)


def test_parameters_are_views_of_one_buffer_and_gradients_accumulate_in_place() -> None:
    model = spec.Model(layers=1)
    with torch.device("meta"):
        gpt = GPT(model, 64)
    flat = FlatParameters(gpt, torch.bfloat16, CPU, torch.float32)
    initialise(flat.named_master(), model, 1)
    flat.publish()
    weight = gpt.get_submodule("blocks.0").qkv.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.float(), flat.named_master()["blocks.0.qkv.weight"].bfloat16().float())
    for _ in range(2):
        (weight.sum() * 3).backward()
    assert weight.grad is None
    part = flat.grad[flat.slices["blocks.0.qkv.weight"]]
    assert (part == 6).all()
    assert flat.grad.sum() == 6 * part.numel()


def test_rotary_positions_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        at = lambda x, p: Rope(torch.tensor([p]), 16, 1e4, torch.float64)(x[None])  # noqa: E731
        return float((at(q, i) * at(k, j)).sum())

    assert score(5, 3) == pytest.approx(score(105, 103), rel=1e-10)
    assert score(5, 3) != pytest.approx(score(5, 4), rel=1e-3)


def test_flops_of_the_reference_shape() -> None:
    # 12 layers, hidden 2048, FFN 8192, 16 heads of 128, vocabulary 131072, classic:
    # per layer 2*2048*8192 + 2048*6144 + 2048*2048 = 50331648 multiply-adds per token.
    model = spec.Model(
        flavour="classic", layers=12, hidden_size=2048, ffn_hidden_size=8192, attention_heads=16, vocab_size=131072
    )
    per_token, per_square = flops(model)
    assert per_token == 6 * (12 * 50331648 + 2048 * 131072)
    assert per_square == 6 * 12 * 2048
