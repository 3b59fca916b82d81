"""A small version of benchmarks/campaigns.py, and answers that are known beforehand."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from log_lines import header, jsonl, record

from dcpbench.analysis.pipeline import Analysis, analyze
from dcpbench.analysis.sources import Source
from dcpbench.faults import LaunchInput
from dcpbench.parse import FORMATS
from dcpbench.spec import CASES, Tolerances

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "campaigns.py"


@pytest.fixture(scope="module")
def campaigns() -> types.ModuleType:
    found = importlib.util.spec_from_file_location("campaigns", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["campaigns"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("pairs", [6, 10])
def test_intervals_cover_and_no_effect_is_hardly_ever_faster(campaigns: types.ModuleType, pairs: int) -> None:
    """With 5 x 60 campaigns and a coverage of 0.96, fewer than 276 (92 %) would come up once in 1 000 seeds."""
    found = [campaigns.simulate(60, pairs, 1.0, scenario, seed=1) for scenario in campaigns.SCENARIOS]
    assert np.mean([outcome.covered for outcome in found]) >= 0.92
    assert np.mean([outcome.verdicts.get("faster", 0.0) for outcome in found]) <= 0.01


def test_a_real_effect_is_found(campaigns: types.ModuleType) -> None:
    found = campaigns.simulate(60, 10, 1.05, "all", seed=1)
    assert found.verdicts.get("slower", 0.0) == 0.0
    assert found.verdicts["faster"] > 0.7


PAIRS, ITERATIONS = 4, 30


def analysed(
    folder: Path, times: dict[str, np.ndarray], *, swap: bool = False, scale: float = 1.0, order: int | None = None
) -> Analysis:
    """The analysis of launches with these times; `order` shuffles the files, `swap` exchanges the cases."""
    launches = []
    for pair in range(PAIRS):
        for place, case in enumerate(CASES):
            source = CASES[1 - place] if swap else case
            rows = [record(i, scale * float(t)) for i, t in enumerate(times[source][pair], 1)]
            path = jsonl(folder / f"{pair}-{case}.jsonl", rows, header(case, f"{pair}-{case}", ITERATIONS))
            position = 2 * pair + 1 + (place + pair + swap) % 2
            table = FORMATS["jsonl"][1](path)
            launches.append(LaunchInput(f"{pair + 1:02d}-{case}", case, pair + 1, position, table))  # type: ignore[arg-type]
    if order is not None:
        random.Random(order).shuffle(launches)
        launches.sort(key=lambda launch: launch.pair)
    return analyze(
        Source("known", tuple(launches)), iterations=None, warmup=2, global_batch_size=8, tolerances=Tolerances()
    )


@pytest.fixture
def times() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    work = rng.gamma(3, 0.3, ITERATIONS)
    return {
        case: work * factor * np.exp(rng.normal(0, 0.01, (PAIRS, 1)) + rng.normal(0, 0.01, (PAIRS, ITERATIONS)))
        for case, factor in (("baseline", 1.2), ("dcp", 1.0))
    }


def test_swapping_the_cases_gives_the_reciprocal(tmp_path: Path, times: dict[str, np.ndarray]) -> None:
    there, back = analysed(tmp_path / "a", times), analysed(tmp_path / "b", times, swap=True)
    assert (there.speed, back.speed) == ("faster", "slower")
    assert there.speedup is not None
    assert back.speedup is not None
    assert there.interval is not None
    assert back.interval is not None
    for name in ("total", "mean", "median", "trimmed_mean"):
        assert getattr(back.speedup, name) == pytest.approx(1 / getattr(there.speedup, name))
    assert (back.interval.low, back.interval.high) == pytest.approx((1 / there.interval.high, 1 / there.interval.low))
    assert back.order_effect == pytest.approx(there.order_effect)
    assert [part.speedup for part in back.lengths] == pytest.approx([1 / part.speedup for part in there.lengths])


def test_scaling_time_changes_nothing(tmp_path: Path, times: dict[str, np.ndarray]) -> None:
    there, scaled = analysed(tmp_path / "a", times), analysed(tmp_path / "b", times, scale=7.0)
    assert there.interval is not None
    assert scaled.interval is not None
    assert (scaled.speed, scaled.verdict) == (there.speed, there.verdict)
    assert scaled.interval.low == pytest.approx(there.interval.low)
    assert [launch.steadiness and launch.steadiness.label for launch in scaled.launches] == [
        launch.steadiness and launch.steadiness.label for launch in there.launches
    ]


def test_shuffling_the_files_changes_nothing(tmp_path: Path, times: dict[str, np.ndarray]) -> None:
    there = analysed(tmp_path, times)
    for order in range(3):
        shuffled = analysed(tmp_path, times, order=order)
        assert shuffled.speedup == there.speedup
        assert shuffled.interval == there.interval
        assert shuffled.order_effect == there.order_effect
        assert shuffled.parity == there.parity
