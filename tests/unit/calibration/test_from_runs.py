"""Refits from the records of finished runs: their jobs and times alone, of several runs together, held out by batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcpbench import records
from dcpbench.calibration import command, from_runs, shown
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.costs import CostModel, Link, LongKernel
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.workload import Domain
from dcpbench.errors import UsageError
from dcpbench.records import IterationRecord, RunHeader
from dcpbench.spec import Spec

SPEC = """
name: {name}
model: {{layers: 12, hidden_size: 2048, ffn_hidden_size: 8192, attention_heads: {heads}, vocab_size: 131072}}
topology: {{device: cuda, gpus_per_node: 2, cp: 2}}
training: {{dtype: bfloat16, iterations: 14, warmup_iterations: 2, global_batch_size: 24}}
data: {{kind: lognormal, mean: 1024, max_length: {longest}, tokens: zipf}}
cases: {{max_seqlen_per_dp_cp_rank: {capacity}, padding: megatron}}
"""
CONSTANT = 0.014


def truth(start: CostModel) -> CostModel:
    """What the machine of these tests does: two attention kernels, and nothing that hides a hop."""
    return replace(
        start,
        base=4e-3,
        token=8.5e-6,
        square=6.5e-10,
        merge=0.0,
        overlap=0.0,
        within=Link(12e-6, 280e9),
        long=LongKernel(3.4e-10, 700.0, 16e6),
    )


def run(folder: Path, name: str, capacity: int, *, heads: int = 16, jobs: bool = True, noise: float = 0.005) -> Path:
    """A finished run of two launches a case, as far as a refit reads it."""
    folder.mkdir()
    text = SPEC.format(name=name, heads=heads, longest=2 * capacity, capacity=capacity)
    (folder / "spec.yaml").write_text(text)
    start = cost_profiles.assumed(
        Spec.model_validate({"model": {"layers": 12, "hidden_size": 2048, "ffn_hidden_size": 8192,
                                       "attention_heads": 16, "vocab_size": 131072}})
    ).cost  # fmt: skip
    random = np.random.default_rng(capacity)
    batches = [
        np.clip(random.lognormal(np.log(capacity / 8), 1.4, 24), 64, 2 * capacity).astype(int).tolist()
        for _ in range(14)
    ]
    for case, scheduler in (("baseline", "dp_balanced"), ("dcp", "default_dynamic_cp")):
        made = schedulers.create(scheduler, domain=Domain(2, 2), capacity=capacity)
        plans = [made.plan(lengths) for lengths in batches]
        exact = [PlannedIteration.of(plan, lengths, made.padding) for plan, lengths in zip(plans, batches, strict=True)]
        times = iteration_times(exact, truth(start)) + CONSTANT
        for pair in (1, 2):
            lines: list[RunHeader | IterationRecord] = [
                RunHeader(
                    case=case,
                    launch=f"0{pair}-{case}",
                    world_size=2,
                    domain_size=2,
                    cp=2,
                    global_batch_size=24,
                    iterations=14,
                    device="NVIDIA H200",
                    attention="symmetric/flash+cudnn",
                    versions={"torch": "9.9"},
                )
            ]
            for number, (one, seconds) in enumerate(zip(exact, times.tolist(), strict=True), start=1):
                summary = zip(one.first, one.size, one.tokens, one.real, strict=True)
                lines.append(
                    IterationRecord(
                        iteration=number,
                        # The warm-up shows nothing about what follows.
                        seconds=seconds * float(np.exp(random.normal(0, noise))) * (1 if number > 2 else 5),
                        jobs=tuple(int(value) for job in summary for value in job) if jobs else (),
                        ended=1796067597.0 + number,
                    )
                )
            file = folder / "launches" / f"0{pair}-{case}" / "records.jsonl"
            file.parent.mkdir(parents=True)
            file.write_text("".join(records.to_json(line) + "\n" for line in lines))
    return folder


def test_one_profile_describes_short_and_long_runs_without_their_data(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", "short", 4096), run(tmp_path / "b", "long", 32768)]
    made, found, agreements = command.refit_runs(paths, tmp_path / "both.json")
    profile = made.profile
    assert cost_profiles.load(tmp_path / "both.json") == profile
    assert (profile.name, profile.kind, profile.refused) == ("both", "measured", None)
    assert found.before > 0.04
    assert found.after < 0.02
    cost = profile.cost
    assert cost.long is not None
    assert cost.token == pytest.approx(8.5e-6, rel=0.05)
    assert cost.long.square == pytest.approx(3.4e-10, rel=0.05)
    assert cost.square > 1.2 * cost.long.square
    assert profile.fit is not None
    assert (profile.fit.of, profile.fit.points, profile.fit.held_out) == ("iterations", 24, 24)
    assert profile.fit.sizes == (1, 2)
    assert 16384 < (profile.fit.most_tokens or 0) <= 32768
    assert profile.key is not None
    assert (profile.key.gpu, profile.key.backend) == ("NVIDIA H200", "symmetric/flash+cudnn")
    assert profile.key.versions == {"torch": "9.9"}
    assert [(one.run, one.scheduler, one.iterations) for one in agreements] == [
        ("short", "dp_balanced", 12), ("short", "default_dynamic_cp", 12),
        ("long", "dp_balanced", 12), ("long", "default_dynamic_cp", 12),
    ]  # fmt: skip
    for one in agreements:
        assert one.predicted_ms == pytest.approx(one.measured_ms, rel=0.02)
        assert f"{one.run}, {one.scheduler}: {one.mape:.1%}" in profile.description
    assert "ended on 2026-11-30" in profile.description
    assert shown.agreement_rows(agreements)[0][:3] == ("short", "dp_balanced", "12")


def test_iterations_are_held_out_by_batch_so_that_no_case_tells_of_the_other(tmp_path: Path) -> None:
    _, found, _ = command.refit_runs([run(tmp_path / "a", "short", 4096)], None)
    assert found.held_out.tolist() == [True, False] * 12  # iterations 3, 4, ... of either case


def test_a_run_that_no_model_describes_is_refused(tmp_path: Path) -> None:
    made, found, _ = command.refit_runs([run(tmp_path / "a", "short", 4096, noise=0.4)], tmp_path / "poor.json")
    assert found.after > 0.05
    assert made.profile.refused is not None
    assert "limit 5%" in made.profile.refused


def test_runs_of_other_models_are_not_mixed(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", "short", 4096), run(tmp_path / "b", "other", 4096, heads=8)]
    with pytest.raises(UsageError, match=r"b is not of the same model, settings, GPU and number of ranks as .*a$"):
        from_runs.profile_from(paths, None, "now")


def test_a_run_that_did_not_record_its_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 0 measured iterations with their jobs; a refit needs at least 8"):
        from_runs.profile_from([run(tmp_path / "a", "short", 4096, jobs=False)], None, "now")
