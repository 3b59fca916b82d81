"""Refusals before anything starts, for both cases, each with a sentence that names what to change."""

from __future__ import annotations

import json
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dcpbench import preflight
from dcpbench.checks import servable
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.data.stream import SampleStream
from dcpbench.data.tokens import Counting
from dcpbench.dcp.workload import PaddingRule, usable_length
from dcpbench.errors import ExitCode, PreflightError
from dcpbench.spec import Spec

NO_GPUS = GpuSurvey()
TWO_GPUS = GpuSurvey(
    gpus=tuple(Gpu(name=str(n), model="H", memory_bytes=2**37, used_bytes=0, processes=0) for n in range(2)),
    driver="580.1",
)

CUDA = {"device": "cuda", "gpus_per_node": 2, "cp": 2}


def spec(**sections: dict[str, Any]) -> Spec:
    base: dict[str, Any] = {
        "topology": {"device": "cpu", "gpus_per_node": 4, "cp": 4},
        "training": {"iterations": 2, "warmup_iterations": 0, "global_batch_size": 4},
        "cases": {"max_seqlen_per_dp_cp_rank": 64},
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return Spec.model_validate(base)


def stream(s: Spec, lengths: list[int]) -> SampleStream:
    array = np.array(lengths, np.int64)
    return SampleStream(
        array,
        array - 1,
        Counting(s.model.vocab_size),
        global_batch_size=s.training.global_batch_size,
        iterations=s.training.iterations,
    )


def report(s: Spec, lengths: list[int] | None = None, **kwargs: Any) -> preflight.PreflightReport:
    kwargs = {"environ": {}, "gpus": NO_GPUS, **kwargs}
    return preflight.inspect(s, stream=None if lengths is None else stream(s, lengths), **kwargs)


def refusals(s: Spec, lengths: list[int] | None = None, **kwargs: Any) -> list[str]:
    return [finding.message for finding in report(s, lengths, **kwargs).refusals]


def warnings(s: Spec, lengths: list[int] | None = None, **kwargs: Any) -> list[str]:
    return [finding.message for finding in report(s, lengths, **kwargs).findings if finding.level == "warn"]


def test_a_good_spec_passes(tmp_path: Path) -> None:
    s = spec()
    result = preflight.check(s, environ={}, stream=stream(s, [10, 100, 200, 256]), folder=tmp_path / "r", gpus=NO_GPUS)
    assert result.refusals == ()
    assert result.device == "cpu"
    messages = [finding.message for finding in result.findings]
    assert "all 2 iterations planned; the dcp case uses CP 4" in messages
    assert "the longest sample, 256 tokens, fits the dcp case (256)" in messages
    json.dumps(result.to_dict(), allow_nan=False)


def test_all_refusals_in_one_error() -> None:
    s = spec(topology={"gpus_per_node": 8, "tp": 2, "cp": 4, "nodes": 2}, cases={"attention": "magic"})
    with pytest.raises(PreflightError) as caught:
        preflight.check(s, environ={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "yes"}, gpus=NO_GPUS)
    assert caught.value.exit_code is ExitCode.PREFLIGHT
    lines = str(caught.value).splitlines()
    assert lines == [
        "topology.tp is 2: the built-in worker has no tensor parallelism yet; set it to 1",
        "cases.attention 'magic' is not known; choose flash, cudnn, sdpa, reference, auto, one of these after "
        "symmetric/ or collective/ or auto/, or te",
        "topology.nodes is 2: only one node is supported yet; set it to 1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO must be 0 or 1; set one of them or unset it",
    ]


def test_pipeline_parallelism_is_refused() -> None:
    assert refusals(spec(topology={"pp": 2, "cp": 2})) == [
        "topology.pp is 2: the built-in worker has no pipeline parallelism yet; set it to 1"
    ]


def test_one_rank_is_refused() -> None:
    assert "DP x CP is 1" in refusals(spec(topology={"gpus_per_node": 1, "cp": 1}))[0]


def test_fewer_samples_than_data_parallel_ranks() -> None:
    s = spec(topology={"gpus_per_node": 8, "cp": 1}, training={"global_batch_size": 7})
    assert refusals(s)[0].startswith("training.global_batch_size 7 is below DP 8")


@pytest.mark.parametrize(("smallest", "reason"), [(3, "power of two"), (8, "only 4 ranks")])
def test_smallest_dynamic_size(smallest: int, reason: str) -> None:
    (message,) = refusals(spec(cases={"min_dynamic_context_parallel_size": smallest}))
    assert message.startswith(f"cases.dcp: min_dynamic_context_parallel_size {smallest}")
    assert reason in message


def test_too_small_capacity_for_the_padding() -> None:
    s = spec(cases={"max_seqlen_per_dp_cp_rank": 1})
    assert len(refusals(s)) == 2
    assert all("max_seqlen_per_dp_cp_rank 1 is too small" in message for message in refusals(s))


# The longest sample


def test_a01_sample_no_group_can_hold_is_refused_before_launch() -> None:
    s = spec(topology={"gpus_per_node": 8, "cp": 8}, cases={"max_seqlen_per_dp_cp_rank": 4096})
    messages = refusals(s, [100, 40000])
    assert len(messages) == 2
    for message in messages:
        assert "sample 1 has 40000 tokens" in message
        assert "32768" in message


def test_a04_limit_that_is_no_multiple_of_the_alignment() -> None:
    assert usable_length(1001, 4, PaddingRule()) == 1000
    # 4 ranks x 1001 tokens hold 4004, but zigzag on 4 ranks needs multiples of 8
    s = spec(cases={"max_seqlen_per_dp_cp_rank": 1001})
    (baseline, dcp) = refusals(s, [4001, 8])
    assert "the baseline case holds at most 4004" in baseline
    assert "the dcp case holds at most 4004" in dcp
    assert "usable length is 4000 because samples are padded to a multiple of 8" in baseline
    assert refusals(s, [4000, 8]) == []


def test_a04_limit_of_1001_tokens_for_the_group() -> None:
    # 1001 tokens for a group of 4 are 250 whole tokens a rank
    s = spec(cases={"max_seqlen_per_dp_cp_rank": 1001 // 4})
    assert "the baseline case holds at most 1000" in refusals(s, [1001, 8])[0]
    assert refusals(s, [1000, 8]) == []


def test_sample_that_fits_the_domain_but_not_the_baseline() -> None:
    s = spec(topology={"gpus_per_node": 4, "cp": 2})
    assert refusals(s, [200, 8, 8, 8]) == [
        "sample 0 has 200 tokens, but the baseline case holds at most 128 (2 ranks x max_seqlen_per_dp_cp_rank 64); "
        "raise the capacity or shorten the samples"
    ]


def test_sample_that_fits_the_baseline_but_not_the_padded_domain() -> None:
    s = spec(
        topology={"gpus_per_node": 6, "cp": 6},
        cases={"max_seqlen_per_dp_cp_rank": 10, "padding": "megatron", "min_dynamic_context_parallel_size": 1},
    )
    messages = refusals(s, [60, 8, 8, 8])
    assert len(messages) == 1
    assert "dcp case" in messages[0]


def test_longest_sample_that_repeats_names_the_sample_not_the_position() -> None:
    s = spec(topology={"gpus_per_node": 2, "cp": 2})
    assert "sample 2 has 300 tokens" in refusals(s, [8, 8, 300])[0]


def test_positions_of_the_classic_model() -> None:
    s = spec(model={"flavour": "classic", "max_position_embeddings": 100})
    assert refusals(s, [101, 8]) == ["sample 0 has 101 tokens, but model.max_position_embeddings is 100; raise it"]
    assert refusals(s, [100, 8]) == []
    assert refusals(spec(model={"max_position_embeddings": 100}), [101, 8]) == []


# Every batch


def test_batch_that_a_scheduler_cannot_serve_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
    from dcpbench.errors import ScheduleError

    real = DefaultDynamicCp.plan

    def plan(self: DefaultDynamicCp, lengths: list[int]) -> Any:
        if 77 in lengths:
            raise ScheduleError("seventy-seven")
        return real(self, lengths)

    monkeypatch.setattr(DefaultDynamicCp, "plan", plan)
    s = spec(training={"iterations": 3})
    assert refusals(s, [8] * 9 + [77] + [8] * 2) == ["iteration 3 of the dcp case cannot be scheduled: seventy-seven"]


def test_large_runs_are_planned_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable, "_PLANNING_BUDGET", 5 * 4 * 4)
    s = spec(training={"iterations": 100, "global_batch_size": 4})
    lengths = [8] * 400
    lengths[4 * 41 + 2] = 200  # iteration 42
    chosen = servable._iterations_to_plan(stream(s, lengths), 4)
    assert chosen == [1, 21, 41, 42, 61, 81]
    assert any("6 of 100 iterations planned" in finding.message for finding in report(s, lengths).findings)


@given(st.lists(st.integers(2, 256), min_size=8, max_size=8), st.sampled_from(["minimal", "megatron"]))
def test_what_preflight_accepts_can_be_planned(lengths: list[int], padding: str) -> None:
    s = spec(cases={"padding": padding})
    assert refusals(s, lengths) == []
    for case in servable._schedulers(s, []).values():
        for batch in (lengths[:4], lengths[4:]):
            assert sorted(sample for job in case.plan(batch).jobs if job.first_rank == job.ranks[0]
                          for sample in job.samples) == [0, 1, 2, 3]  # fmt: skip


# Data


def test_repeating_data_and_short_vocabulary_are_mentioned() -> None:
    s = spec(data={"kind": "csv", "path": "x.csv"}, model={"vocab_size": 16})
    found = warnings(s, [8, 32])
    assert "the data have 2 samples and a launch takes 8: samples repeat" in found
    assert any("counting tokens start again" in message for message in found)


def test_zero_tolerances_are_mentioned() -> None:
    zero = {"loss_atol": 0, "loss_rtol": 0}
    assert any("both 0" in message for message in warnings(spec(tolerances=zero)))
    assert not any("both 0" in message for message in warnings(spec(tolerances=zero | {"check_loss_parity": False})))


# Environment and attention


@pytest.mark.parametrize("value", ["true", "false", "2", "", " 1"])
def test_a33_determinism_switch_that_is_neither_0_nor_1(value: str) -> None:
    assert refusals(spec(), environ={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": value}) == [
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO must be 0 or 1; set one of them or unset it"
    ]


@pytest.mark.parametrize("environ", [{}, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
                                     {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}])  # fmt: skip
def test_a33_determinism_switch_that_is_fine(environ: dict[str, str]) -> None:
    assert refusals(spec(), environ=environ) == []


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        (None, "it is not installed"),
        ("2.8.1", "Transformer Engine 2.8.1 is installed; packed sequences need 2.9 or newer"),
        ("1.14.0+cu12", "packed sequences need 2.9"),
        ("2.20.2", None),
    ],
)
def test_transformer_engine(monkeypatch: pytest.MonkeyPatch, installed: str | None, sentence: str | None) -> None:
    def version(name: str) -> str:
        assert name == "transformer-engine"
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(metadata, "version", version)
    for name in ("te", "te/all_gather"):
        found = refusals(spec(topology=CUDA, cases={"attention": name}), gpus=TWO_GPUS)
        assert len(found) == (sentence is not None)
        assert sentence is None or sentence in found[0]
    assert "te/p2p" in refusals(spec(topology=CUDA, cases={"attention": "te/ring"}), gpus=TWO_GPUS)[0]
    assert refusals(spec(topology=CUDA), gpus=TWO_GPUS) == []


@pytest.mark.parametrize("name", ["flash", "cudnn", "collective/flash", "symmetric/auto"])
def test_attention_that_needs_cuda(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "1.30")
    assert "choose auto" in refusals(spec(cases={"attention": name}))[0]
    assert refusals(spec(topology=CUDA, cases={"attention": name}), gpus=TWO_GPUS) == []
    single = spec(topology=CUDA, cases={"attention": name}, training={"dtype": "float32"})
    assert bool(refusals(single, gpus=TWO_GPUS)) == (name != "symmetric/auto")


def test_cudnn_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    (message,) = refusals(spec(topology=CUDA, cases={"attention": "cudnn"}), gpus=TWO_GPUS)
    assert "nvidia-cudnn-frontend" in message


@pytest.mark.parametrize("name", ["sdpa", "reference", "collective/sdpa", "auto", "auto/auto"])
def test_attention_that_runs_anywhere(name: str) -> None:
    assert refusals(spec(cases={"attention": name})) == []


def test_attention_names_are_those_of_the_worker() -> None:
    from dcpbench.dcp.attention import backend

    assert set(preflight.KERNELS) == {"auto", *backend.KERNELS}
    assert set(preflight.TRANSPORTS) == {"auto", *backend.TRANSPORTS}
    assert preflight.TE_COMMUNICATIONS == backend.TE_COMMUNICATIONS
    assert preflight.TE_MINIMUM == backend.TE_MINIMUM


# Machine


def test_device() -> None:
    for device, survey, expected in (
        ("auto", NO_GPUS, "cpu"), ("auto", TWO_GPUS, "cuda"), ("cpu", TWO_GPUS, "cpu"), ("cuda", NO_GPUS, "cuda"),
    ):  # fmt: skip
        assert preflight.resolve_device(spec(topology={"device": device}), survey) == expected


def test_too_few_gpus() -> None:
    (message,) = refusals(spec(topology={"device": "cuda"}), gpus=TWO_GPUS)
    assert message.startswith("topology.gpus_per_node is 4, but CUDA sees 2 here")


def test_busy_gpus() -> None:
    busy = GpuSurvey(gpus=(TWO_GPUS.gpus[0], Gpu(name="1", model="H", processes=1)))
    s = spec(topology={"device": "auto", "gpus_per_node": 2, "cp": 2})
    (message,) = refusals(s, gpus=busy)
    assert message.startswith("GPU 1 is busy with 1 compute process;")
    # a GPU that the run does not use may be busy
    idle_first = GpuSurvey(gpus=(*TWO_GPUS.gpus, Gpu(name="2", model="H", processes=3)))
    assert refusals(s, gpus=idle_first) == []


def test_memory_in_use_by_nobody() -> None:
    held = GpuSurvey(
        gpus=(*TWO_GPUS.gpus[:1], Gpu(name="1", model="H", memory_bytes=2**37, used_bytes=2**36, processes=0))
    )
    s = spec(topology={"device": "auto", "gpus_per_node": 2, "cp": 2})
    assert refusals(s, gpus=held) == []
    assert any("GPU 1 holds 64.0 GiB" in message for message in warnings(s, gpus=held))


def test_cpu_ranks_that_cannot_fit() -> None:
    assert "ranks on the CPU need about" in refusals(spec(topology={"gpus_per_node": 10**6, "cp": 1}, training={"global_batch_size": 10**6}))[0]  # fmt: skip # noqa: E501


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert any("4 ranks share 2 CPU cores" in message for message in warnings(spec()))


# Files


def test_load_path(tmp_path: Path) -> None:
    s = spec(training={"load_path": str(tmp_path)})
    assert "it has no .metadata file" in refusals(s)[0]
    (tmp_path / ".metadata").write_bytes(b"")
    assert refusals(s) == []


def test_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusals(spec(), folder=tmp_path / "file" / "run")[0]
    assert refusals(spec(), folder=tmp_path / "a" / "b") == []
    assert not (tmp_path / "a").exists()
    s = spec(training={"save_path": str(tmp_path / "file" / "checkpoint")})
    assert "training.save_path" in refusals(s)[0]


@pytest.mark.parametrize(("free", "level"), [(50, "refuse"), (500, "warn"), (5000, "ok")])
def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, free * 2**20))
    found = [finding.level for finding in report(spec(), folder=tmp_path).findings if finding.rule == "space"]
    assert found == [level]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"schedule": {"refit": 7}}, "a refit needs 8 iterations"),
        ({"schedule": {"refit": 10}, "runner": "megatron_lm"}, "schedule.refit needs the built-in worker"),
        ({"schedule": {"refit": 10}, "mode": "lockstep"}, "schedule.refit is not defined in mode lockstep"),
    ],
)
def test_a_spec_with_refits_that_are_not_defined_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Spec.model_validate(changed)


def test_refits_that_could_do_nothing_are_refused() -> None:
    laminar = {"dcp": {"scheduler": "laminar"}}
    long = {"iterations": 40, "warmup_iterations": 10}

    def found(cases: dict[str, Any], training: dict[str, Any]) -> tuple[str, str]:
        made = report(spec(schedule={"refit": 10}, cases=cases, training=training))
        (finding,) = (finding for finding in made.findings if finding.rule == "refit")
        return finding.level, finding.message

    level, message = found({}, long)
    assert level == "refuse"
    assert "neither case plans with a cost profile" in message
    level, message = found(laminar, {**long, "iterations": 29})
    assert level == "refuse"
    assert "29 iterations, of which 10 are warm-up" in message
    assert found(laminar, long) == ("ok", "the cost profile is refitted 2 times in each launch of dcp")
    assert not [finding for finding in report(spec()).findings if finding.rule == "refit"]
