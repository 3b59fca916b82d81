"""The parity table of docs/method.md: each row as series with the statistics it states, and its verdict."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dcpbench.stats.bootstrap import block_length, mean_interval
from dcpbench.stats.gates import Control
from dcpbench.stats.parity import Parity, parity

STEPS = 200
Values = NDArray[np.float64]


def trained(seed: int = 7) -> Values:
    """A loss that falls from 4.85 to 1.86, with the batches' own ups and downs."""
    rng = np.random.default_rng(seed)
    trend = 1.86 + 2.99 * np.exp(-np.arange(STEPS) / 40)
    return np.asarray(trend + np.concatenate([[0.0], rng.normal(0, 0.05, STEPS - 1)]))


def rounding(seed: int) -> Values:
    """Two such series differ by 1e-7 at step 1, 5e-4 in the first 20 and 3e-3 at the end."""
    size = (3e-3 * (1 - np.exp(-np.arange(STEPS) / 60)) + 1e-7) / np.sqrt(2)
    return np.asarray(np.random.default_rng(seed).normal(0, 1, STEPS) * size)


def launches(seed: int, pairs: int = 3) -> Values:
    return np.stack([trained() + rounding(100 * seed + n) for n in range(pairs)])


ROWS = {
    "exact rerun": (lambda: launches(1), ()),
    "sample order permuted": (lambda: launches(2), ()),
    "1-ulp jitter": (lambda: launches(3), ()),
    "other chunk counts": (lambda: launches(4), ()),
    "loss scaled by 1.001": (lambda: 1.001 * launches(2), ("L1", "L2", "L3")),
    "loss scaled by 1.02": (lambda: 1.02 * launches(2), ("L1", "L2", "L3", "L4")),
    "different data": (
        lambda: np.stack([trained(8) + rounding(n) for n in range(3)]) + 0.058,
        ("L1", "L2", "L3", "L4"),
    ),
}


def judged(row: str) -> Parity:
    return parity(launches(1), ROWS[row][0](), 0.0, 1e-2)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_table(row: str) -> None:
    found = judged(row)
    assert tuple(gate.name for gate in found.failed) == ROWS[row][1]
    assert found.passed == (not ROWS[row][1])
    assert all(gate.enforced for gate in found.gates)


STATED = {
    # step 1, RMS over steps 1-20, RMS over steps 101-200, greatest, correlation of steps; least and most of three runs
    "exact rerun": ((0, 0), (0, 0), (0, 0), (0, 0), (1, 1)),
    "sample order permuted": ((0, 5e-5), (3e-4, 7e-4), (2e-3, 3.7e-3), (6e-3, 1.3e-2), (0.99, 1)),
    "1-ulp jitter": ((0, 5e-5), (3e-4, 7e-4), (2e-3, 3.7e-3), (6e-3, 1.3e-2), (0.99, 1)),
    "other chunk counts": ((0, 5e-5), (3e-4, 7e-4), (2e-3, 3.7e-3), (6e-3, 1.3e-2), (0.99, 1)),
    "loss scaled by 1.001": ((4.8e-3, 4.9e-3), (4e-3, 5e-3), (2.5e-3, 4.5e-3), (6e-3, 1.3e-2), (0.99, 1)),
    "loss scaled by 1.02": ((9.6e-2, 9.8e-2), (8e-2, 9.7e-2), (3.7e-2, 5e-2), (9e-2, 0.11), (0.99, 1)),
    "different data": ((5.7e-2, 5.9e-2), (4e-2, 0.12), (5e-2, 0.12), (0.1, 0.35), (-0.3, 0.3)),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_series_have_the_statistics_that_the_table_states(row: str) -> None:
    base, dcp = launches(1), ROWS[row][0]()
    size = np.abs(dcp - base)
    found = judged(row)
    assert found.step_correlation is not None
    statistics = (
        size[:, 0].max(),
        np.sqrt((size[:, :20] ** 2).mean()),
        np.sqrt((size[:, 100:] ** 2).mean()),
        found.max_abs_diff,
        found.step_correlation,
    )
    for value, (least, most) in zip(statistics, STATED[row], strict=True):
        assert least - 1e-12 <= value <= most + 1e-12, (row, statistics)


def test_different_data_show_in_the_steps_alone() -> None:
    assert (judged("loss scaled by 1.02").step_correlation or 0) > 0.99
    assert (judged("different data").step_correlation or 0) < 0.5


def test_one_pair_has_no_floor_and_says_so() -> None:
    base = launches(1, 1)
    found = parity(base, 1.001 * launches(2, 1), 0.0, 1e-2)
    assert all(gate.floor is None for gate in found.gates)
    assert {gate.name for gate in found.gates if not gate.enforced} == {"L2", "L3"}
    assert [gate.name for gate in found.failed] == ["L1"]
    assert {gate.name for gate in parity(base, base, 0.0, 1e-5, float32=True).gates if not gate.enforced} == set()


def test_float32_accepts_less() -> None:
    base = np.full((1, 8), 5.0)
    dcp = base.copy()
    dcp[0, 0] += 1e-3
    assert parity(base, dcp, 0.0, 1e-2).passed
    assert [gate.name for gate in parity(base, dcp, 0.0, 1e-2, float32=True).failed] == ["L1"]


def test_an_absolute_tolerance_holds_at_every_gate() -> None:
    base = np.full((2, 30), 5.0)
    assert not parity(base, base + 0.01, 0.0, 1e-2, float32=True).passed
    assert parity(base, base + 0.01, 0.02, 1e-2, float32=True).passed


def test_a_floor_widens_a_gate_threefold() -> None:
    base = np.full((2, 100), 4.0)
    base[1, 0] += 0.01
    for difference, failed in ((0.029, []), (0.031, ["L1"])):
        dcp = base.copy()
        dcp[:, 0] += difference
        assert [gate.name for gate in parity(base, dcp, 0.0, 1e-2).failed] == failed


def test_a_first_step_tolerance_of_its_own_stands_whatever_is_accepted_later() -> None:
    """Counting tokens need 0.1 once rounding has grown; a scale of 1.001 must fail at the first step all the same."""
    base = np.stack([12.0 * np.exp(-np.arange(40) / 8)] * 2)
    assert parity(base, 1.001 * base, 0.1, 0.0).passed
    found = parity(base, 1.001 * base, 0.1, 0.0, first_step_rtol=5e-4)
    assert [gate.name for gate in found.failed] == ["L1"]
    assert parity(base, base + 1e-3, 0.1, 0.0, first_step_rtol=5e-4).passed


def test_a_layout_control_gives_the_floor_that_equal_launches_lack() -> None:
    """Deterministic launches of a case are equal: L2 and L3 stand on nothing until another layout shows rounding."""
    base, dcp = np.stack([trained()] * 2), np.stack([trained() + rounding(5)] * 2)
    alone = parity(base, dcp, 0.0, 1e-2)
    assert {gate.name for gate in alone.gates if not gate.enforced} == {"L2", "L3"}
    control = Control(trained() + rounding(7))
    sound = parity(base, dcp, 0.0, 1e-2, control=control)
    assert sound.passed
    assert all(gate.enforced for gate in sound.gates)
    floors = {gate.name: gate.floor for gate in sound.gates}
    early = (control.loss - base[0])[1:20]
    assert floors["L1"] == pytest.approx(abs(control.loss[0] - base[0, 0]))
    assert floors["L2"] == pytest.approx(np.sqrt(np.mean(early**2)))
    assert floors["L3"] == pytest.approx(abs((control.loss - base[0]).mean()))
    scaled = parity(base, 1.001 * dcp, 0.0, 1e-2, control=control)
    assert [gate.name for gate in scaled.failed] == ["L1", "L2", "L3"]


def test_a_layout_control_gives_the_floor_of_gradient_norms() -> None:
    base, norms = np.full((1, 4), 5.0), np.full((1, 4), 2.0)
    control = Control(base[0], np.full(4, 2.02))
    found = {gate.name: gate for gate in parity(base, base, 0.0, 1e-2, norms, norms * 1.02, control=control).gates}
    assert found["L5"].floor == pytest.approx(0.01)
    assert found["L5"].ratio == pytest.approx(2.0)
    assert found["L5"].passed
    unknown = Control(base[0], np.full(4, np.nan))
    assert parity(base, base, 0.0, 1e-2, norms, norms, control=unknown).gates[-1].floor is None


def test_gradient_norms_are_a_gate() -> None:
    base, norms = np.full((1, 4), 5.0), np.full((1, 4), 2.0)
    (failed,) = parity(base, base, 0.0, 1e-2, norms, norms * 2).failed
    assert failed.name == "L5"
    assert failed.statistic == pytest.approx(1.0)
    assert parity(base, base, 0.0, 1e-2, norms, norms * 1.005).passed
    unknown = parity(base, base, 0.0, 1e-2, norms, np.full((1, 4), np.nan))
    assert "L5" not in {gate.name for gate in unknown.gates}


def test_bootstrap_covers_the_mean_of_a_series_that_remembers() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        noise = rng.normal(0, 1, 400)
        for i in range(1, 400):
            noise[i] += 0.5 * noise[i - 1]
        low, high = mean_interval(noise)
        covered += low <= 0 <= high
    assert covered >= 47
    assert block_length(100) == 5
    assert mean_interval(np.full(7, 2.5)) == pytest.approx((2.5, 2.5))
