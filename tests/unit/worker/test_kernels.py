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

from dcpbench import spec  # noqa: E402
from dcpbench.dcp.attention.reference import packed_attention  # noqa: E402
from dcpbench.worker import fused, linear, model  # noqa: E402
from dcpbench.worker.fused import Rope  # noqa: E402
from dcpbench.worker.kernels import activation, adamw, cross_entropy, norm, rope  # noqa: E402
from dcpbench.worker.loss import losses_and_gradient  # noqa: E402
from dcpbench.worker.model import GPT, initialise  # noqa: E402
from dcpbench.worker.parameters import FlatParameters  # noqa: E402

# The interpreter's own: what a GPU does in silence, NumPy remarks on.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "RuntimeWarning")]


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


@pytest.mark.parametrize("rows", [1, 7, 0])
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("branched", [True, False])
def test_norms_are_torchs(rows: int, width: int, centred: bool, branched: bool) -> None:
    torch.manual_seed(3)
    leaves = [torch.randn(rows, width, dtype=torch.float64, device=DEVICE) for _ in range(2)]
    x, branch = (leaf.float().double().requires_grad_() for leaf in leaves)
    weight, bias = torch.randn(2, width, dtype=torch.float64, device=DEVICE)
    weight.requires_grad_()
    bias.requires_grad_()
    branch_bias = torch.randn(width, device=DEVICE)
    total = x + branch + branch_bias.double() if branched else x
    shape = (width,)
    if centred:
        normed = torch.nn.functional.layer_norm(total, shape, weight, bias, 1e-5)
    else:
        normed = torch.nn.functional.rms_norm(total, shape, weight, 1e-5)
    grad_normed, grad_total = torch.randn(2, rows, width, dtype=torch.float64, device=DEVICE)
    ((normed * grad_normed).sum() + (total * grad_total).sum()).backward()

    got_total, got, means, scales = norm.add_norm(
        x.detach().float(), branch.detach().float() if branched else None, branch_bias if branched else None,
        weight.detach().float(), bias.detach().float() if centred else None, 1e-5, centred,
    )  # fmt: skip
    torch.testing.assert_close(got_total.double(), total.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), normed.detach(), rtol=1e-5, atol=1e-5)
    totals = [torch.ones(width, device=DEVICE) for _ in range(3)]
    grad = norm.add_norm_backward(
        grad_normed.float(), grad_total.float(), (got_total, means, scales), weight.detach().float(), centred,
        totals[0], totals[1] if centred else None, totals[2] if branched else None,
    )  # fmt: skip
    torch.testing.assert_close(grad.double(), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(totals[0].double() - 1, weight.grad, rtol=1e-4, atol=1e-5)
    if centred:
        torch.testing.assert_close(totals[1].double() - 1, bias.grad, rtol=1e-4, atol=1e-5)
    if branched:
        torch.testing.assert_close(totals[2].double() - 1, branch.grad.sum(0), rtol=1e-4, atol=1e-4)
    alone = norm.add_norm_backward(
        grad_normed.float(), None, (got_total, means, scales), weight.detach().float(), centred, totals[0], None, None
    )
    torch.testing.assert_close(alone.double(), x.grad - grad_total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (37, 1030), (0, 8)])
def test_gelu_is_torchs(rows: int, width: int) -> None:
    torch.manual_seed(4)
    x = 3 * torch.randn(rows, width, device=DEVICE)
    bias, total = torch.randn(width, device=DEVICE), torch.ones(width, device=DEVICE)
    exact = (x.double() + bias.double()).requires_grad_()
    grad_out = torch.randn(rows, width, device=DEVICE)
    expected = torch.nn.functional.gelu(exact, approximate="tanh")
    expected.backward(grad_out.double())
    torch.testing.assert_close(activation.gelu(x, bias).double(), expected.detach(), rtol=1e-5, atol=1e-6)
    got = activation.gelu_backward(grad_out, x, bias, total)
    torch.testing.assert_close(got.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total.double() - 1, exact.grad.sum(0), rtol=1e-4, atol=1e-4)
    # Without a bias: the same of what has it already.
    torch.testing.assert_close(activation.gelu(x + bias, None), activation.gelu(x, bias), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(activation.gelu_backward(grad_out, x + bias, None, None), got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1030), (0, 8)])
def test_swiglu_is_torchs(rows: int, width: int) -> None:
    torch.manual_seed(5)
    x = 3 * torch.randn(rows, 2 * width, device=DEVICE)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    grad_out = torch.randn(rows, width, device=DEVICE)
    expected.backward(grad_out.double())
    torch.testing.assert_close(activation.swiglu(x).double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(activation.swiglu_backward(grad_out, x).double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "rotated"), [(8, True), (12, True), (7, False), (8, False)])
@pytest.mark.parametrize("rows", [1, 19, 0])
def test_rope_and_joining_are_those_of_the_model(rows: int, dim: int, rotated: bool) -> None:
    torch.manual_seed(6)
    heads, kv_heads = 4, 2
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=DEVICE)
    exact = qkv.double().requires_grad_()
    q, k, v = exact.split((heads, kv_heads, kv_heads), dim=1)
    angles = None
    if rotated:
        turn = Rope(torch.arange(rows, device=DEVICE) * 3, dim, 100.0, torch.float64)
        q, k = turn(q), turn(k)
        angles = turn.cos.float(), turn.sin.float()
        rope.rotate(qkv, heads + kv_heads, *angles)
    torch.testing.assert_close(qkv.double(), torch.cat((q, k, v), 1).detach(), rtol=1e-5, atol=1e-5)
    grad_q = torch.randn(rows, heads, dim, device=DEVICE)
    # Gradients of keys and values as attention makes them: side by side in one tensor.
    grad_kv = torch.randn(rows, 2, kv_heads, dim, device=DEVICE)
    torch.autograd.backward((q, k, v), (grad_q.double(), grad_kv[:, 0].double(), grad_kv[:, 1].double()))
    bias = torch.ones(qkv.shape[1] * dim, device=DEVICE)
    got = rope.join(grad_q, grad_kv[:, 0], grad_kv[:, 1], angles, bias)
    torch.testing.assert_close(got.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.double() - 1, exact.grad.sum(0).flatten(), rtol=1e-4, atol=1e-4)
    assert torch.equal(rope.join(grad_q, grad_kv[:, 0], grad_kv[:, 1], angles, None), got)


LENGTHS = [5, 1, 13]


class Reference:
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_attention(q, k, v, LENGTHS, LENGTHS)

    def finish(self) -> None: ...


def gradients(flavour: str, recompute: str, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, by parameter, of two microbatches."""
    config = spec.Model(
        flavour=flavour, layers=2, hidden_size=32, ffn_hidden_size=24, attention_heads=4,
        kv_heads=2, vocab_size=29, init_std=0.3,
    )  # fmt: skip
    with torch.device("meta"):
        gpt = GPT(config, 20, recompute)
    flat = FlatParameters(gpt, dtype, DEVICE, dtype)
    flat.fill(lambda weights: initialise(weights, config, 3))
    tokens, labels = torch.randint(0, 29, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(DEVICE)
    total = 0.0
    for _ in range(2):
        loss = gpt(tokens, labels, positions, Reference())
        loss.backward()
        total += loss.item()
    return total, {name: flat.grad[part] for name, part in flat.slices.items()}


@pytest.mark.parametrize("flavour", ["classic", "modern"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_of_kernels_has_the_gradients_of_one_without(
    flavour: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_loss, expected = gradients(flavour, "none", torch.float64)
    for module in (fused, linear, model):
        monkeypatch.setattr(module, "kernels_serve", lambda x: x.dtype == torch.float32)
    loss, got = gradients(flavour, recompute, torch.float32)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-3, atol=1e-5 * scale, msg=name)
