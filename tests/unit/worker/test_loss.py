"""The summed cross-entropy and its gradients."""

import pytest
import torch
import torch.nn.functional as F

from dcpbench.worker import loss as loss_module
from dcpbench.worker.loss import linear_cross_entropy


@pytest.mark.parametrize("chunk", [1 << 30, 13 * 4 * 8, 1])
def test_loss_and_gradients_match_torch(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (11,))
    labels[[2, 10]] = -100
    (3.0 * linear_cross_entropy(hidden, weight, labels)).backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    (3.0 * expected).backward()
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[0], hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], weight.grad, rtol=1e-12, atol=1e-12)


def test_a15_rows_without_any_label_give_zero_and_finite_gradients() -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    total = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    total.backward()
    assert total.item() == 0.0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_a16_nan_at_a_masked_row_is_left_out_and_elsewhere_is_not() -> None:
    hidden = torch.randn(3, 3)
    hidden[1] = float("nan")
    weight = torch.randn(7, 3, requires_grad=True)
    labels = torch.tensor([1, -100, 2])
    mine = hidden.clone().requires_grad_()
    total = linear_cross_entropy(mine, weight, labels)
    total.backward()
    clean = F.cross_entropy(hidden[[0, 2]] @ weight.T, labels[[0, 2]], reduction="sum")
    torch.testing.assert_close(total.float(), clean)
    assert (mine.grad[1] == 0).all()
    assert weight.grad.isfinite().all()
    labels[1] = 3
    assert linear_cross_entropy(hidden, weight, labels).isnan()


def test_no_rows_at_all() -> None:
    hidden = torch.empty(0, 3, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.int64)).backward()
    assert (weight.grad == 0).all()


def test_the_gradient_of_the_weight_goes_to_its_buffer_in_the_forward_pass() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (9,))
    linear_cross_entropy(hidden, weight, labels).backward()
    expected, expected_weight = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    weight.main_grad = torch.ones_like(weight)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    assert (weight.main_grad == 1).all()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, expected_weight + 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError):
        (2.0 * linear_cross_entropy(hidden, weight, labels)).backward()


def test_chunks_are_equal_and_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1000)
    assert loss_module.chunk_rows(0, 100) == 1
    assert loss_module.chunk_rows(10, 100) == 10
    assert loss_module.chunk_rows(11, 100) == 6
    assert loss_module.chunk_rows(25, 100) == 9
    assert loss_module.chunk_rows(3, 5000) == 1
