"""Where an iteration's time went, from names and times of kernels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpbench import profiles
from dcpbench.worker.profile import Event, Profiler, breakdown, kind, subtract, union

NAMES = {
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>(x)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x128",
        "_merge",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    ],
    "gemm": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int>",
        "aten::addmm",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "_pick",
        "_signal_and_wait",
        "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, unsigned long)",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ],
    "optimizer": ["_adamw", "Optimizer.step#AdamW.step", "aten::_fused_adamw_"],
    "loss": ["_cross_entropy", "_LinearCrossEntropy", "aten::logsumexp"],
    "other": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps<float>>>",
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::indexFuncLargeIndex<float, long>",
        "aten::native_layer_norm",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(k, name) for k, names in NAMES.items() for name in names])
def test_kinds_of_real_kernel_names(expected: str, name: str) -> None:
    assert kind(name) == expected


def test_communication_is_exposed_only_while_nothing_is_computed() -> None:
    events = [
        Event("flash_fwd", 1.0, 2.0, 7),
        Event("nvjet_tst", 2.0, 4.0, 7),
        Event("ncclDevKernel_AllReduce", 3.0, 6.0, 20),
        Event("ncclDevKernel_AllGather", 5.0, 6.5, 21),
        Event("_adamw", 7.0, 8.0, 7),
        Event("Memset (Device)", 9.5, 11.0, 7),
    ]
    parts, communication = breakdown(events, 0.0, 10.0)
    assert parts == pytest.approx(
        {
            "attention": 1.0,
            "gemm": 2.0,
            "loss": 0.0,
            "optimizer": 1.0,
            "other": 0.5,
            "exposed_communication": 2.5,
            "idle": 3.0,
        }
    )
    assert communication == pytest.approx(3.5)


def test_an_operator_inside_another_counts_once() -> None:
    events = [
        Event("Optimizer.step#AdamW.step", 0.0, 4.0, 1),
        Event("aten::mul_", 1.0, 2.0, 1),
        Event("aten::linear", 4.0, 6.0, 1),
        Event("aten::addmm", 4.5, 5.5, 1),
    ]
    parts, _ = breakdown(events, 0.0, 6.0)
    # What lies inside the optimizer is the optimizer's: `other` is the last resort, after it and after products.
    assert parts["optimizer"] == pytest.approx(4.0)
    assert parts["gemm"] == pytest.approx(1.0)
    assert parts["other"] == pytest.approx(1.0)
    assert parts["idle"] == 0.0


def test_nothing_at_all_is_idle() -> None:
    parts, communication = breakdown([], 2.0, 5.0)
    assert parts["idle"] == 3.0
    assert communication == 0.0
    assert sum(breakdown([Event("x", 0.0, 9.0, 0)], 5.0, 5.0)[0].values()) == 0.0


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda x: (x[0], x[0] + x[1])), max_size=12)


@given(intervals, intervals)
def test_union_and_subtract_are_those_of_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def points(parts: list) -> set[int]:
        return {point for start, stop in parts for point in range(int(start), int(stop))}

    one, other = (union([part for part in x if part[0] < part[1]]) for x in (a, b))
    assert points(one) == points(a)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(one))
    assert points(subtract(one, other)) == points(one) - points(other)


@given(
    st.lists(st.tuples(st.sampled_from([n for x in NAMES.values() for n in x]), st.integers(0, 50), st.integers(1, 9)))
)
def test_parts_add_up_to_the_iteration(drawn: list[tuple[str, int, int]]) -> None:
    parts, communication = breakdown([Event(n, s, s + d, i) for i, (n, s, d) in enumerate(drawn)], 5.0, 45.0)
    assert sum(parts.values()) == pytest.approx(40.0)
    assert parts["exposed_communication"] <= communication + 1e-9


def test_a_profiled_iteration_on_the_cpu_leaves_trace_and_summary(tmp_path) -> None:
    folder = tmp_path / "01-dcp" / profiles.FOLDER
    profiler = Profiler(folder, 1, (2,), torch.device("cpu"))
    for iteration in (1, 2, 3):
        profiler.start(iteration)
        x = torch.randn(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        optimizer = torch.optim.AdamW([x], fused=True)
        optimizer.step()
        profiler.stop(iteration, 0.25)
    assert sorted(file.name for file in folder.iterdir()) == [
        "rank1-iteration2.json.gz",
        "rank1-iteration2.summary.json",
    ]
    found = profiles.read("01-dcp", folder.parent)
    assert found is not None
    (profiled,) = found.iterations
    assert (profiled.rank, profiled.iteration, profiled.device, profiled.scheduling) == (1, 2, "cpu", 0.25)
    assert sum(profiled.parts.values()) == pytest.approx(profiled.seconds)
    assert profiled.parts["gemm"] > 0
    assert profiled.parts["optimizer"] > 0
