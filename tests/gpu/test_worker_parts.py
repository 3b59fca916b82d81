"""The trainer's parts on one GPU: against float64, beyond 32-bit offsets, without waiting for the device."""

import pytest
import torch
import torch.nn.functional as F

from dcpbench import spec
from dcpbench.dcp.attention.reference import packed_attention
from dcpbench.spec import Training
from dcpbench.worker.linear import Embedding, Linear, products_accumulate
from dcpbench.worker.loss import linear_cross_entropy
from dcpbench.worker.model import GPT, initialise
from dcpbench.worker.optimizer import Optimizer
from dcpbench.worker.parameters import FlatParameters
from dcpbench.worker.warming import warm_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # The first product of a backward, which autograd runs in a thread of its own, makes that thread's context.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
GIB = 1 << 30


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def off_scale(got: torch.Tensor, expected: torch.Tensor) -> float:
    return abs(float((got.double() * expected.double()).sum() / expected.double().square().sum()) - 1)


def test_products_are_added_in_float32_by_one_kernel() -> None:
    assert products_accumulate(cuda(), torch.bfloat16, torch.float32)


def test_weight_gradients_of_many_microbatches_lose_nothing() -> None:
    torch.manual_seed(0)
    linear = Linear(256, 512).to(cuda(), torch.bfloat16)
    linear.weight.main_grad = torch.zeros(512, 256, device=cuda())
    linear.bias.main_grad = torch.zeros(512, device=cuda())
    weight, bias = torch.zeros(512, 256, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for rows in (1000, 1, 333, 0, 4096):
        x = torch.randn(rows, 256, device=cuda(), dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(rows, 512, device=cuda(), dtype=torch.bfloat16)
        linear(x).backward(grad)
        weight += grad.double().cpu().T @ x.detach().double().cpu()
        bias += grad.double().cpu().sum(0)
        if rows:
            expected = grad.double() @ linear.weight.detach().double()
            assert relative(x.grad, expected) < 4e-3
    assert relative(linear.weight.main_grad.cpu(), weight) < 1e-5
    assert relative(linear.bias.main_grad.cpu(), bias) < 1e-5


def test_embedding_gradients_repeat_bit_for_bit_when_asked_to() -> None:
    torch.manual_seed(0)
    table = Embedding(50, 64, device=cuda(), dtype=torch.bfloat16)
    indices = torch.randint(0, 50, (20000,), device=cuda())
    grad = torch.randn(20000, 64, device=cuda(), dtype=torch.bfloat16)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            table.weight.main_grad = torch.zeros(50, 64, device=cuda())
            table(indices).backward(grad)
            found.append(table.weight.main_grad)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.zeros(50, 64, dtype=torch.float64, device=cuda()).index_add_(0, indices, grad.double())
    assert relative(found[0], expected) < 1e-5
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 1000), (1, 131072), (4500, 131072), (3000, 50257), (77, 33)])
def test_loss_and_gradients_are_those_of_float64(rows: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 256, device=cuda(), dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(vocabulary, 256, device=cuda())).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(vocabulary, 256, device=cuda())
    labels = torch.randint(0, vocabulary, (rows,), device=cuda())
    labels[1::7] = -100
    total = linear_cross_entropy(hidden, weight, labels)
    total.backward()
    if rows == 0:
        assert total.item() == 0
        return
    # The reference goes through the same bfloat16 logits, a thousand rows at a time.
    expected, grad_weight = 0.0, torch.zeros(vocabulary, 256, dtype=torch.float64, device=cuda())
    grad_hidden = torch.zeros(rows, 256, dtype=torch.float64, device=cuda())
    for start in range(0, rows, 1000):
        part = slice(start, start + 1000)
        logits = (hidden[part] @ weight.T).detach().double().requires_grad_()
        loss = F.cross_entropy(logits, labels[part], ignore_index=-100, reduction="sum")
        loss.backward()
        expected += loss.item()
        grad_hidden[part] = logits.grad @ weight.detach().double()
        grad_weight += logits.grad.T @ hidden[part].detach().double()
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert relative(hidden.grad, grad_hidden) < 6e-3
    assert off_scale(hidden.grad, grad_hidden) < 5e-4
    assert relative(weight.main_grad, grad_weight) < 6e-3
    assert off_scale(weight.main_grad, grad_weight) < 5e-4
    assert (hidden.grad[1::7] == 0).all()


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_products_are_tried_beforehand_without_a_trace(recompute: str) -> None:
    model = spec.Model(layers=2, hidden_size=64, ffn_hidden_size=128, attention_heads=4, vocab_size=1009)
    with torch.device("meta"):
        gpt = GPT(model, 128, recompute)  # type: ignore[arg-type]
    flat = FlatParameters(gpt, torch.bfloat16, cuda(), torch.float32)
    flat.fill(lambda weights: initialise(weights, model, 3))
    warm_products(gpt, {1, 64, 333, 0})
    assert (flat.grad == 0).all()
    assert all(parameter.grad is None for parameter in gpt.parameters())


def test_rows_times_vocabulary_beyond_32_bits() -> None:
    from dcpbench.worker.kernels.cross_entropy import replace_by_gradient

    rows, vocabulary = 16500, 131072
    assert rows * vocabulary > 2**31
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of free GPU memory")
    logits = torch.randn(rows, vocabulary, device=cuda(), dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (rows,), device=cuda())
    labels[-2] = -100
    probed = [0, 16384, rows - 2, rows - 1]
    wide = logits[probed].double().requires_grad_()
    expected = F.cross_entropy(wide, labels[probed], ignore_index=-100, reduction="none")
    expected.sum().backward()
    losses = torch.empty(rows, device=cuda())
    replace_by_gradient(logits, labels, losses, -100)
    torch.testing.assert_close(losses[probed].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[probed].double(), wide.grad, rtol=1e-2, atol=1e-8)


def test_adamw_beyond_32_bits() -> None:
    from dcpbench.worker.kernels import adamw

    count = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 42 * GIB:
        pytest.skip("needs 42 GiB of free GPU memory")
    weight, grad, first, second = (torch.ones(count, device=cuda()) for _ in range(4))
    compute = torch.zeros(count, device=cuda(), dtype=torch.bfloat16)
    adamw.update(
        weight, grad, first, second, compute, torch.tensor(1.0, device=cuda()), iteration=1, lr=0.5, betas=(0.5, 0.5),
        eps=0.0, weight_decay=0.0,
    )  # fmt: skip
    # Moments stay 1; corrected they are 2 and 2: the step is 0.5 x 2 / sqrt(2).
    for place in (0, 2**31 - 1, 2**31, count - 1):
        assert weight[place].item() == pytest.approx(1 - 2**-0.5, rel=1e-6)
        assert grad[place].item() == 0
        assert compute[place].item() == pytest.approx(1 - 2**-0.5, rel=2**-8)
    assert weight.min().item() == weight.max().item()


class Reference:
    lengths = (700, 1, 99, 224)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_attention(q, k, v, self.lengths, self.lengths)

    def finish(self) -> None: ...


def trained(
    flavour: str, device: torch.device, dtype: torch.dtype, recompute: str = "none"
) -> tuple[float, torch.Tensor, FlatParameters]:
    """One iteration of two microbatches: (loss, gradients, parameters after the update)."""
    model = spec.Model(
        flavour=flavour, layers=2, hidden_size=128, ffn_hidden_size=384, attention_heads=4, vocab_size=1009,
        init_std=0.1,
    )  # fmt: skip
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.device("meta"):
        gpt = GPT(model, 1024, recompute)
    flat = FlatParameters(gpt, dtype, device, exact)
    flat.fill(lambda weights: initialise(weights, model, 3))
    optimizer = Optimizer(flat, Training(clip_grad=0.5, lr=1e-2)) if exact == torch.float32 else None
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 1009, (2, sum(Reference.lengths)), generator=generator).to(device)
    labels[::5] = -100
    positions = torch.cat([torch.arange(n) for n in Reference.lengths]).to(device)
    total = 0.0
    for _ in range(2):
        loss = gpt(tokens, labels, positions, Reference())
        loss.backward()
        total += loss.item()
    grad = flat.grad.clone()
    if optimizer is not None:
        optimizer.step(1000, 1e-2)
        assert not flat.grad.any()
    return total, grad, flat


@pytest.mark.parametrize("flavour", ["classic", "modern"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_trains_as_on_the_cpu(flavour: str, dtype: torch.dtype, tolerance: float, recompute: str) -> None:
    loss, grad, flat = trained(flavour, cuda(), dtype, recompute)
    expected_loss, expected_grad, _ = trained(flavour, torch.device("cpu"), torch.float64)
    assert loss == pytest.approx(expected_loss, rel=tolerance / 20)
    assert relative(grad.cpu(), expected_grad) < tolerance
    if dtype == torch.float32:
        _, _, on_cpu = trained(flavour, torch.device("cpu"), torch.float32)
        assert relative(flat.master.cpu(), on_cpu.master) < 1e-4
    else:
        assert torch.equal(flat.compute, flat.master.bfloat16())


def test_an_iteration_never_waits_for_the_device() -> None:
    model = spec.Model(flavour="classic", layers=2, hidden_size=128, ffn_hidden_size=256, vocab_size=1009)
    with torch.device("meta"):
        gpt = GPT(model, 1024)
    flat = FlatParameters(gpt, torch.bfloat16, cuda(), torch.float32)
    flat.fill(lambda weights: initialise(weights, model, 3))
    optimizer = Optimizer(flat, Training())
    rows = sum(Reference.lengths)
    tokens = torch.randint(0, 1009, (rows,), device=cuda())
    positions = torch.arange(rows, device=cuda())

    def iteration() -> torch.Tensor:
        loss = gpt(tokens, tokens, positions, Reference())
        loss.backward()
        optimizer.step(rows, 1e-3)
        return loss.detach()

    iteration()  # compiles kernels and tries out addmm
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
