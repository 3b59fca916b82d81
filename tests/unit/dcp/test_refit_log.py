"""When refits of a running launch start and apply, and the file that tells of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.dcp import refit_log
from dcpbench.dcp.cost_profiles import CostProfile, Iteration, coefficients_of
from dcpbench.dcp.costs import H200_1B
from dcpbench.dcp.refit_log import RefitLog, Refitted, starts, usable
from dcpbench.errors import LogError
from dcpbench.spec import FEWEST_TO_REFIT, Training

PROFILE = CostProfile(
    name="x", kind="measured", coefficients=coefficients_of(H200_1B), iteration=Iteration(seconds=0.5)
)


def a_refit(after: int, *, adopted: bool = True) -> Refitted:
    cost = replace(H200_1B, token=after * 1e-6)
    return Refitted(
        after=after,
        applies_from=after + 8,
        adopted=adopted,
        why_not=None if adopted else "it is poor",
        iterations=8,
        error_before=0.1,
        error_after=0.01,
        coefficients=coefficients_of(cost),
        iteration_seconds=after * 1e-3,
        seconds=0.2,
    )


def a_log(*refits: Refitted) -> RefitLog:
    return RefitLog(interval=8, half_life=16, basis="measured profile x", refits=refits)


def test_warm_up_and_profiled_iterations_do_not_count() -> None:
    training = Training(iterations=60, warmup_iterations=5, profile_iterations=(7,))
    assert usable(training, 10, 10) == [6, 8, 9, 10]
    assert starts(training, 10) == [20, 30, 40, 50]
    assert starts(training, 0) == []
    assert usable(training, 10, 100) == list(range(21, 101))


@given(st.integers(1, 300), st.integers(0, 60), st.integers(FEWEST_TO_REFIT, 80))
def test_every_refit_has_enough_to_fit_to_and_iterations_to_apply_to(count: int, warmup: int, interval: int) -> None:
    training = Training(iterations=count, warmup_iterations=min(warmup, count - 1))
    for after in starts(training, interval):
        assert after % interval == 0
        assert after + interval <= count
        assert len(usable(training, interval, after)) >= FEWEST_TO_REFIT
        assert min(usable(training, interval, after)) > training.warmup_iterations


def test_the_file_is_read_back_equal(tmp_path: Path) -> None:
    assert refit_log.read(tmp_path) is None
    log = a_log(a_refit(8), a_refit(16, adopted=False))
    refit_log.write(tmp_path, log)
    assert refit_log.read(tmp_path) == log
    assert [path.name for path in tmp_path.iterdir()] == ["refits.json"]


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ('"after": 8', '"after": "x"', "refits.0.after"),
    ],
)
def test_a_file_of_another_version_or_a_changed_one_is_refused(tmp_path: Path, old: str, new: str, where: str) -> None:
    refit_log.write(tmp_path, a_log(a_refit(8)))
    file = tmp_path / "refits.json"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(LogError, match=rf"refits\.json does not tell of refits: {where}"):
        refit_log.read(tmp_path)


def test_what_is_in_force_is_the_last_that_was_adopted_and_applies() -> None:
    log = a_log(a_refit(8), a_refit(16, adopted=False), a_refit(24))
    assert log.in_force(15, PROFILE) == (PROFILE.cost, 0.5)
    for iteration, token in ((16, 8e-6), (31, 8e-6), (32, 24e-6), (99, 24e-6)):
        cost, seconds = log.in_force(iteration, PROFILE)
        assert cost.token == token
        assert seconds == pytest.approx(1e3 * token)
        assert not cost.assumed
