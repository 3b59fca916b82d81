"""Comparing schedulers without GPUs: one ground, one bound, one reference, and refusals that cost nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.dcp import schedulers
from dcpbench.dcp.costs import H200_1B, Link
from dcpbench.dcp.schedulers.dp_balanced import DpBalanced
from dcpbench.dcp.workload import BatchPlan
from dcpbench.errors import SpecError
from dcpbench.planner import planning
from dcpbench.planner.planning import Evaluated, Ground, Refusal, Setting

FIXED = Setting("dp_balanced", 2048, 4, 1)
DYNAMIC = Setting("default_dynamic_cp", 2048, 4, 1)
LAMINAR = Setting("laminar", 2048, 4, 1)
BATCHES = ((4000, 900, 300, 200, 1500, 130, 700, 2600), (500, 600, 700, 800, 900, 1000, 1100, 6000))


def ground(**changes: object) -> Ground:
    return replace(Ground(8, H200_1B, BATCHES, "minimal"), **changes)  # type: ignore[arg-type]


def test_all_settings_are_judged_over_one_bound_and_one_reference() -> None:
    found = planning.compare([FIXED, DYNAMIC, LAMINAR], FIXED, ground(), limit=60)
    assert [row.setting for row in found.rows] == [FIXED, DYNAMIC, LAMINAR]
    assert found.refusals == ()
    assert found.configured == found.rows[0]
    assert found.rows[0].speedup == 1
    for row in found.rows:
        assert row.over_bound >= 1
        assert row.over_bound * found.bound_ms == pytest.approx(row.mean_ms)
        assert row.speedup == pytest.approx(found.rows[0].mean_ms / row.mean_ms)
        assert row.speedup_range is not None
        assert row.speedup_range[0] <= row.speedup <= row.speedup_range[1]
        assert sum(row.time_by_size.values()) == pytest.approx(1)
        assert row.peak_tokens <= 2048
        assert row.sd_ms is not None
    assert [one.setting for one in found.pictured] == [FIXED, DYNAMIC, LAMINAR]


def test_the_reference_counts_whether_it_is_asked_for_or_not() -> None:
    both = planning.compare([FIXED, LAMINAR], FIXED, ground(), limit=60)
    alone = planning.compare([LAMINAR], FIXED, ground(), limit=60)
    assert [row.setting for row in alone.rows] == [LAMINAR]
    assert alone.rows[0].speedup == both.rows[1].speedup
    assert alone.configured is not None
    assert [one.setting for one in alone.pictured] == [LAMINAR]


def test_what_an_iteration_takes_besides_is_in_times_and_speedups_but_not_over_the_bound() -> None:
    plain = planning.compare([LAMINAR], FIXED, ground(), limit=60)
    with_rest = planning.compare([LAMINAR], FIXED, ground(iteration_seconds=0.5), limit=60)
    before, after = plain.rows[0], with_rest.rows[0]
    assert after.mean_ms == pytest.approx(before.mean_ms + 500)
    assert after.over_bound == before.over_bound
    assert before.speedup is not None
    assert after.speedup is not None
    assert abs(after.speedup - 1) < abs(before.speedup - 1)


def test_a_setting_that_cannot_serve_is_a_refusal_and_the_others_have_figures() -> None:
    small = Setting("dp_balanced", 128, 4, 1)
    found = planning.compare([small, LAMINAR], small, ground(), limit=60)
    assert [row.setting for row in found.rows] == [LAMINAR]
    assert found.configured is None
    assert found.rows[0].speedup is None
    assert found.rows[0].speedup_range is None
    assert [one.setting for one in found.refusals] == [small]
    assert "sample 0 has 4000 tokens" in found.refusals[0].reason


def test_an_unknown_scheduler_is_no_refusal_but_an_error() -> None:
    with pytest.raises(SpecError, match="did you mean 'laminar'"):
        planning.evaluate(Setting("lamina", 2048, 4, 1), ground(), 60)


@dataclass(frozen=True)
class Endless(DpBalanced):
    def plan(self, lengths: Sequence[int]) -> BatchPlan:
        while len(lengths) > 64:
            pass
        return super().plan(lengths)


def test_a_scheduler_that_does_not_finish_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedulers.SCHEDULERS, "endless", Endless.create)
    slow = Setting("endless", 2048, 4, 1)
    long = ground(batches=((500,) * 80, (600,) * 80))
    found = planning.compare([slow, DYNAMIC], FIXED, long, limit=1.0)
    assert [row.setting for row in found.rows] == [DYNAMIC]
    assert found.refusals == (
        Refusal(slow, "skipped: it had planned 0 of 2 batches within the time limit of 1 s (--time-limit)"),
    )


def test_pictures_are_kept_only_where_they_are_wanted() -> None:
    assert planning.compare([FIXED, LAMINAR], FIXED, ground(), limit=60, keep=False).pictured == ()


def test_an_imagined_machine_has_other_nodes_and_bandwidths() -> None:
    cost = planning.machine(H200_1B, node_size=4, bandwidth=(1e9, 2e9))
    assert cost.node_size == 4
    assert (cost.within, cost.between) == (Link(H200_1B.within.latency, 1e9), Link(H200_1B.between.latency, 2e9))
    assert planning.machine(H200_1B, node_size=8) == H200_1B


def test_slower_links_make_shared_microbatches_slower() -> None:
    slow = planning.machine(H200_1B, node_size=2, bandwidth=(1e9, 1e9))
    fast = planning.compare([FIXED], FIXED, ground(), limit=60).rows[0]
    assert planning.compare([FIXED], FIXED, ground(cost=slow), limit=60).rows[0].mean_ms > fast.mean_ms


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
    node=st.sampled_from([1, 2, 4, 8]),
    batch=st.lists(st.integers(1, 3000), min_size=16, max_size=48),
    policy=st.sampled_from(["minimal", "megatron"]),
)
def test_no_setting_beats_the_bound(ranks: int, node: int, batch: list[int], policy: str) -> None:
    own = Ground(ranks, replace(H200_1B, node_size=node), (tuple(batch),), policy)  # type: ignore[arg-type]
    asked = [Setting(name, 3072 + 64 * ranks, 1, 1) for name in schedulers.SCHEDULERS]
    limits = planning.bounds(own, asked)
    for setting in asked:
        found = planning.evaluate(setting, own, 60)
        if isinstance(found, Evaluated):
            assert found.predictions[0].makespan >= limits[0] * (1 - 1e-9)
