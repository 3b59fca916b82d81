"""The Triton kernels against plain torch: compiled where there is a GPU, else by Triton's interpreter.

The interpreter of Triton 3.6 turns one-element arrays into numbers, which NumPy from 2.4 on refuses.
"""

import os

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
pytest.importorskip("triton")
if DEVICE.type == "cpu" and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("Triton's interpreter needs NumPy below 2.4", allow_module_level=True)

from dcpbench.worker.kernels import adamw, cross_entropy  # noqa: E402
from dcpbench.worker.loss import losses_and_gradient  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's own


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


@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 7), (3, 300), (2, 8192), (3, 20000), (0, 9)])
def test_cross_entropy_is_torchs(rows: int, vocabulary: int) -> None:
    torch.manual_seed(1)
    logits = 4 * torch.randn(rows, vocabulary, device=DEVICE)
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    if rows:
        labels[-1] = -100
        logits[-1] = float("nan")  # nothing of a row without a label may leak
        logits[0, : vocabulary // 2] = float("-inf")
        labels[0] = vocabulary - 1
    wide = logits.double()
    expected = torch.empty(rows, dtype=torch.float64, device=DEVICE)
    losses_and_gradient(wide, labels, expected)
    losses = torch.empty(rows, device=DEVICE)
    cross_entropy.replace_by_gradient(logits, labels, losses, -100)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), wide, rtol=1e-4, atol=1e-6)
    assert rows == 0 or (logits[-1] == 0).all()


def test_cross_entropy_of_one_block_of_minus_infinity_and_rows_apart() -> None:
    torch.manual_seed(2)
    buffer = torch.randn(4, 20000, device=DEVICE)
    buffer[:, :9000] = float("-inf")
    logits = buffer[:, :18000]  # a row does not begin where the last one ended
    labels = torch.tensor([9000, 17999, 10000, -100], device=DEVICE)
    wide, expected = logits.double(), torch.empty(4, dtype=torch.float64, device=DEVICE)
    losses_and_gradient(wide, labels, expected)
    behind = buffer[:, 18000:].clone()
    losses = torch.empty(4, device=DEVICE)
    cross_entropy.replace_by_gradient(logits, labels, losses, -100)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), wide, rtol=1e-4, atol=1e-6)
    assert torch.equal(buffer[:, 18000:], behind)


def test_a_label_outside_the_vocabulary_gives_a_nan_loss() -> None:
    losses = torch.zeros(3, device=DEVICE)
    labels = torch.tensor([0, 11, -7], device=DEVICE)
    cross_entropy.replace_by_gradient(torch.randn(3, 11, device=DEVICE), labels, losses, -100)
    assert losses.isnan().tolist() == [False, True, True]
