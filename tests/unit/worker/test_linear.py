"""Linear layers and embeddings that write to the gradient buffer, against autograd."""

import pytest
import torch
from torch import nn

from dcpbench.worker.linear import Embedding, Linear, add_product, products_accumulate

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self, bias: bool, linear: type[nn.Linear], embedding: type[nn.Embedding]) -> None:
        super().__init__()
        self.table = embedding(7, 6)
        self.first, self.second = linear(6, 5, bias=bias), linear(5, 4, bias=bias)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.table(indices))))


def pair(bias: bool, dtype: torch.dtype) -> tuple[Small, Small]:
    torch.manual_seed(0)
    plain, ours = Small(bias, nn.Linear, nn.Embedding).to(dtype), Small(bias, Linear, Embedding).to(dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_two_microbatches_add_up_in_the_buffer(bias: bool) -> None:
    plain, ours = pair(bias, torch.float64)
    for parameter in ours.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    for indices in (torch.tensor([0, 3, 3, 6, 3]), torch.tensor([1, 3])):
        a, b = plain(indices), ours(indices)
        assert torch.equal(a, b)
        weights = torch.randn_like(a)
        (a * weights).sum().backward()
        (b * weights).sum().backward()
    for (name, expected), parameter in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, expected.grad, rtol=1e-12, atol=1e-12, msg=name)
        assert parameter.grad is None


def test_narrow_gradients_are_summed_in_the_type_of_the_buffer() -> None:
    _, ours = pair(True, torch.bfloat16)
    for parameter in ours.parameters():
        parameter.main_grad = torch.full(parameter.shape, 2.0**-12)
    ours(torch.tensor([2] * 512)).sum().backward()
    # 512 equal rows: bfloat16 would have lost the small number that was there before, and most of the rows.
    assert (ours.second.bias.main_grad == 512 + 2.0**-12).all()
    row = ours.table.weight.main_grad[2] - 2.0**-12
    step = (row / 512).bfloat16().float()
    torch.testing.assert_close(row, step * 512, rtol=1e-3, atol=1e-4)
    assert (ours.table.weight.main_grad[[0, 1, 3, 4, 5, 6]] == 2.0**-12).all()


def test_without_a_buffer_the_gradient_is_autograds() -> None:
    plain, ours = pair(True, torch.float32)
    indices = torch.tensor([5, 5, 0])
    plain(indices).sum().backward()
    ours(indices).sum().backward()
    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


def test_no_rows_leave_the_buffer_as_it_is() -> None:
    _, ours = pair(True, torch.float32)
    for parameter in ours.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    ours(torch.empty(0, dtype=torch.int64)).sum().backward()
    assert all((parameter.main_grad == 1).all() for parameter in ours.parameters())


def test_add_product_adds_where_no_fused_kernel_exists() -> None:
    assert not products_accumulate(CPU, torch.bfloat16, torch.float32)
    total = torch.full((3, 2), 0.5)
    add_product(total, torch.ones(8, 3, dtype=torch.bfloat16), torch.ones(8, 2, dtype=torch.bfloat16))
    assert (total == 8.5).all()
