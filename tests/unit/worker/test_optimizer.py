"""AdamW on flat buffers against torch's own, the schedule, and the per-token division."""

import math

import pytest
import torch
from torch import nn

from dcpbench.spec import Training
from dcpbench.worker.optimizer import Optimizer, learning_rate
from dcpbench.worker.parameters import FlatParameters

CPU = torch.device("cpu")


def test_updates_match_a_plain_adamw_with_clipping() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    flat_model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    flat = FlatParameters(flat_model, torch.float32, CPU, torch.float32)
    for name, weight in flat.named_master().items():
        weight.copy_(plain.get_parameter(name).detach())
    training = Training(weight_decay=0.1, clip_grad=0.5, lr=1e-2)
    optimizer = Optimizer(flat, training)
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim < 2]
    expected = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2,
        betas=(0.9, 0.999), eps=1e-8,
    )  # fmt: skip
    for step in range(5):
        x = torch.randn(11, 5)
        flat.grad.zero_()
        expected.zero_grad()
        flat_model(x).square().sum().backward()
        (plain(x).square().sum() / 11).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        expected.step()
        got = optimizer.step(11, 1e-2)
        torch.testing.assert_close(got, norm, rtol=1e-5, atol=0)
        for name, weight in flat.named_master().items():
            torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6, msg=f"{step}")


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    training = Training(iterations=100, warmup_iterations=0, lr=1.0, min_lr=0.1, lr_warmup_iterations=10)
    assert learning_rate(training, 1) == pytest.approx(0.1)
    assert learning_rate(training, 10) == pytest.approx(1.0)
    assert learning_rate(training, 11) == pytest.approx(1.0)
    assert learning_rate(training, 56) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(training, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    rates = [learning_rate(training, i) for i in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
