"""The Triton kernels against plain torch: compiled where there is a GPU, else by Triton's interpreter."""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
pytest.importorskip("triton")

from dcpbench.worker.kernels import adamw  # noqa: E402


@pytest.mark.parametrize("count", [1, 64, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(count, device=DEVICE)
    compute = weight if dtype == torch.float32 else torch.zeros(count, dtype=dtype, device=DEVICE)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    expected = torch.nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3)
    for iteration in range(1, 6):
        grad = torch.randn(count, device=DEVICE)
        expected.grad = grad * 0.25
        reference.step()
        adamw.update(
            weight, grad, first, second, compute, torch.tensor(0.25, device=DEVICE), iteration=iteration, lr=1e-2,
            betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3,
        )  # fmt: skip
        assert (grad == 0).all()
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-5, atol=1e-6)
        # The interpreter cuts off where hardware rounds: one unit in the last place of bfloat16.
        torch.testing.assert_close(compute.float(), weight, rtol=2**-7, atol=0)


def test_adamw_leaves_what_lies_behind_the_last_element() -> None:
    buffers = [torch.ones(100, device=DEVICE) for _ in range(4)]
    compute = torch.ones(100, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.tensor(1.0, device=DEVICE)
    adamw.update(
        *(buffer[:70] for buffer in buffers), compute[:70], scale, iteration=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8,
        weight_decay=0.0,
    )  # fmt: skip
    assert all((buffer[70:] == 1).all() for buffer in (*buffers, compute))
    assert not (buffers[0][:70] == 1).any()


def test_adamw_keeps_the_digits_of_a_small_decay() -> None:
    weight = torch.full((64,), 1024.0, device=DEVICE)
    nothing = [torch.zeros_like(weight) for _ in range(3)]
    for iteration in range(1, 101):
        adamw.update(
            weight, *nothing, weight, torch.tensor(1.0, device=DEVICE), iteration=iteration, lr=1e-4, betas=(0.9, 0.99),
            eps=1e-8, weight_decay=0.05,
        )  # fmt: skip
    # 1 - lr x decay is 1 - 5e-6; rounded to float32 it would be off by 1 %.
    assert weight[0].item() == pytest.approx(1024 * (1 - 5e-6) ** 100, abs=0.004)
