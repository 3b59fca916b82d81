from pathlib import Path

import numpy as np
import pytest
from log_lines import run_folder, spec

from dcpbench import disturbances
from dcpbench.analysis import analyze_run
from dcpbench.telemetry import COLUMNS, throttle_names


def gpu_csv(path: Path, reasons: list[int], foreign: list[object]) -> None:
    rows = [
        f"t,0,1980,2619,700,60,99,1000,{throttle_names(bits)},{n}" for bits, n in zip(reasons, foreign, strict=True)
    ]
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")


def test_what_disturbs_is_named_and_ordinary_work_is_not(tmp_path: Path) -> None:
    gpu_csv(tmp_path / "a.csv", [0x0, 0x4, 0x60, 0x20], [0, "", 0, 2])
    assert sorted(disturbances.read(tmp_path / "a.csv")) == sorted(
        (
            "another program on its GPU in 1 of 4 samples",
            "thermal throttling in 2 of 4 samples",
            "thermal throttling by the hardware in 1 of 4 samples",
        )
    )
    assert disturbances.read(tmp_path / "none.csv") == ()


def test_an_iteration_that_stands_out_is_named_with_its_cause_and_counted(tmp_path: Path) -> None:
    steady = [1.0 + 0.001 * (i % 3) for i in range(24)]
    spike = [*steady[:10], 3.0, *steady[11:]]
    times = {f"{pair:02d}-{case}": steady for pair in range(1, 5) for case in ("baseline", "dcp")}
    folder = run_folder(tmp_path, {**times, "02-dcp": spike}, spec(4, 24, 2))
    gpu_csv(folder / "launches" / "02-dcp" / "gpu.csv", [0x20], [0])
    analysis = analyze_run(folder)
    (caution,) = [caution for caution in analysis.cautions if caution.startswith("02-dcp")]
    assert "iteration 11 stands out" in caution
    assert "thermal throttling in 1 of 1 samples" in caution
    assert analysis.speedup is not None
    assert analysis.speedup.by_pair[1] < 0.95


def test_a_verdict_that_hangs_on_single_iterations_is_none(tmp_path: Path) -> None:
    """Every baseline launch has one slow iteration: with it dcp looks faster, without it equivalent."""
    steady = [1.0 + 0.001 * (i % 3) for i in range(24)]
    times = {}
    for pair in range(1, 5):
        times[f"{pair:02d}-dcp"] = steady
        times[f"{pair:02d}-baseline"] = [t + 2.0 * (i == 8 + 2 * pair) for i, t in enumerate(steady)]
    analysis = analyze_run(run_folder(tmp_path, times, spec(4, 24, 2)))
    assert analysis.interval is not None
    assert analysis.interval.low > 1.01
    assert analysis.speed == "inconclusive"
    assert any("Without the iterations that stand out the speed-up is equivalent" in c for c in analysis.cautions)


def test_neighbours_of_the_same_case_give_the_timing_floor(tmp_path: Path) -> None:
    times = {
        f"{pair:02d}-{case}": [(1.0 if case == "dcp" else 2.0) * (1 + 0.01 * pair)] * 6
        for pair in range(1, 5)
        for case in ("baseline", "dcp")
    }
    analysis = analyze_run(run_folder(tmp_path / "four", times, spec(4, 6, 1)))
    ratios = np.log([1.02 / 1.01, 1.03 / 1.02, 1.04 / 1.03])
    assert analysis.timing_floor == pytest.approx(ratios.std(ddof=1))
    one = analyze_run(run_folder(tmp_path / "one", {"01-baseline": [1.0] * 6, "01-dcp": [1.0] * 6}))
    assert one.timing_floor is None
