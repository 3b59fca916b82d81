"""Products tried before the first iteration leave no trace."""

import pytest
import torch

from dcpbench import spec
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.warming import warm, warm_products


def model(recompute: str) -> tuple[GPT, FlatParameters]:
    config = spec.Model(layers=2, hidden_size=64, ffn_hidden_size=128, attention_heads=4, vocab_size=1009)
    with torch.device("meta"):
        gpt = GPT(config, 128, recompute)  # type: ignore[arg-type]
    flat = FlatParameters(gpt, torch.bfloat16, torch.device("cpu"), torch.float32)
    flat.fill(lambda weights: initialise(weights, config, 3))
    return gpt, flat


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_stay_zero(recompute: str) -> None:
    gpt, flat = model(recompute)
    warm_products(gpt, {1, 64, 333, 0})
    assert (flat.grad == 0).all()
    assert all(parameter.grad is None for parameter in gpt.parameters())


def test_no_layout_is_made_where_nothing_is_compiled_or_loaded() -> None:
    def layouts():  # type: ignore[no-untyped-def]
        pytest.fail("asked for")
        yield

    warm(model("none")[0], None, layouts())  # type: ignore[arg-type]
