"""Sweeps: what is asked, which settings that means, and what is recommended within the memory limit."""

from __future__ import annotations

import pytest

from dcpbench.dcp.costs import H200_1B
from dcpbench.errors import UsageError
from dcpbench.planner import sweep
from dcpbench.planner.planning import Comparison, Figures, Ground, Setting

USUAL = Setting("dp_balanced", 2048, 4, 1)


def row(setting: Setting, ms: float, peak: int) -> Figures:
    return Figures(setting, ms, None, 1.0, 1.0, (1.0, 1.0), 0.0, 0.0, 1.0, {1: 1}, {1: 1.0}, peak, 1.0)


def comparison(*rows: Figures) -> Comparison:
    return Comparison(Ground(8, H200_1B, ((1,),), "minimal"), (1.0,), None, rows, (), ())


def test_values_are_numbers_doublings_and_steps() -> None:
    assert sweep.parse(["capacity=512,1000:4100", "cp=1:8,min_cp=2,4", "capacity=1:7:3"]) == {
        "capacity": (1, 4, 7, 512, 1000, 2000, 4000),
        "cp": (1, 2, 4, 8),
        "min_cp": (2, 4),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1024", "has no key"),
        ("", "has no key"),
        ("size=3", "there is no 'size'; it takes capacity, cp, min_cp"),
        ("capacity=", "capacity= is no number"),
        ("capacity=1,", "capacity= is no number"),
        ("capacity=two", "capacity=two is no number"),
        ("capacity=-4", "capacity=-4 is no number"),
        ("capacity=1:2:3:4", "is no number"),
        ("capacity=0", "at least 1"),
        ("capacity=1:9:0", "at least 1"),
        ("cp=8:1", "ends before it begins"),
        ("capacity=1:900000000:1", "larger step"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_part(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sweep.parse([text])


def test_only_what_matters_to_a_scheduler_is_varied() -> None:
    swept = {"capacity": (1024, 2048), "cp": (2, 4), "min_cp": (1, 2)}
    made = sweep.settings(["dp_balanced", "laminar"], USUAL, swept)
    assert len(made) == len(set(made))
    assert {(one.capacity, one.cp) for one in made if one.fixed} == {(c, k) for c in (1024, 2048) for k in (2, 4)}
    dynamic = [one for one in made if not one.fixed]
    assert {(one.capacity, one.min_size) for one in dynamic} == {(c, k) for c in (1024, 2048) for k in (1, 2)}
    assert {one.cp for one in dynamic} == {4}


def test_every_scheduler_is_also_planned_as_configured() -> None:
    made = sweep.settings(["dp_balanced", "default_dynamic_cp"], USUAL, {"capacity": (512,)})
    assert [one.capacity for one in made] == [2048, 2048, 512, 512]


def test_more_settings_than_anybody_waits_for_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 2,000"):
        sweep.settings(["laminar"], USUAL, {"capacity": tuple(range(1, 1500)), "min_cp": (1, 2)})


def test_the_fastest_that_fits_is_recommended_and_a_faster_one_that_does_not_is_named() -> None:
    usual, large = Setting("laminar", 2048, 4, 1), Setting("laminar", 8192, 4, 1)
    fixed = Setting("dp_balanced", 2048, 4, 1)
    found = sweep.answer(
        comparison(row(large, 80.0, 8000), row(fixed, 120.0, 2048), row(usual, 100.0, 2048)),
        ["dp_balanced", "laminar"],
        USUAL,
        4096,
    )
    assert [one.mean_ms for one in found.rows] == [100.0, 120.0, 80.0]
    assert found.within == 2
    assert found.best is not None
    assert found.best.setting == usual
    assert found.beyond is not None
    assert found.beyond.setting == large
    assert [(one.scheduler, one.configured, one.best) for one in found.choices] == [
        ("dp_balanced", found.rows[1], found.rows[1]),
        ("laminar", found.rows[0], found.rows[0]),
    ]


def test_a_larger_capacity_that_the_data_never_fill_is_within_the_limit() -> None:
    found = sweep.answer(comparison(row(Setting("laminar", 8192, 4, 1), 80.0, 3000)), ["laminar"], USUAL, 4096)
    assert found.within == 1
    assert found.beyond is None
    assert found.choices[0].configured is None


def test_a_slower_setting_above_the_limit_is_not_named() -> None:
    fits, large = Setting("laminar", 2048, 4, 1), Setting("laminar", 8192, 4, 1)
    found = sweep.answer(comparison(row(large, 101.0, 8192), row(fits, 100.0, 2048)), ["laminar"], USUAL, 2048)
    assert found.beyond is None


def test_nothing_within_the_limit_has_no_best() -> None:
    found = sweep.answer(comparison(row(Setting("laminar", 2048, 4, 1), 80.0, 2048)), ["laminar"], USUAL, 1000)
    assert found.best is None
    assert found.choices[0].best is None
    assert found.beyond is found.rows[0]
