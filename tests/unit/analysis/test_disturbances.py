from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_lines import run_folder, spec

from dcpbench.analysis import disturbances
from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.telemetry import COLUMNS, throttle_names

START = 1_780_000_000.0
"""Iteration i of `log_lines.record` ends 10 i seconds later."""


def gpu_csv(
    path: Path,
    reasons: list[int],
    foreign: list[object],
    *,
    after: list[float] | None = None,
    clocks: list[int] | None = None,
    cores: list[object] | None = None,
) -> None:
    """One sample each; `after` is their time in seconds after START."""
    count = len(reasons)
    when = [datetime.fromtimestamp(START + t, UTC).isoformat(timespec="milliseconds") for t in after or range(count)]
    rows = [
        f"{t},0,{clock},2619,700,60,99,1000,{throttle_names(bits)},{n},{busy}"
        for t, bits, n, clock, busy in zip(
            when, reasons, foreign, clocks or [1980] * count, cores or [""] * count, strict=True
        )
    ]
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")


def test_what_disturbs_is_named_and_ordinary_work_is_not(tmp_path: Path) -> None:
    gpu_csv(tmp_path / "a.csv", [0x0, 0x4, 0x60, 0x20], [0, "", 0, 2])
    assert sorted(disturbances.read(tmp_path / "a.csv").causes) == sorted(
        (
            "another program on its GPU in 1 of 4 samples",
            "thermal throttling in 2 of 4 samples",
            "thermal throttling by the hardware in 1 of 4 samples",
        )
    )
    assert disturbances.read(tmp_path / "none.csv").causes == ()


def test_a_gpu_at_rest_is_not_disturbed(tmp_path: Path) -> None:
    gpu_csv(tmp_path / "a.csv", [0] * 10, [0] * 10, clocks=[345] * 4 + [1980] * 6)
    text = (tmp_path / "a.csv").read_text().splitlines()
    at_rest = [line.replace(",99,", ",0,") if ",345," in line else line for line in text]
    (tmp_path / "a.csv").write_text("\n".join(at_rest) + "\n")
    assert disturbances.read(tmp_path / "a.csv").causes == ()
    assert len(disturbances.read(tmp_path / "a.csv").samples) == 6


def test_what_is_unusual_within_the_launch_counts(tmp_path: Path) -> None:
    """Clocks and loads are held against the rest of the launch; a power cap that always holds is ordinary."""
    quiet: list[object] = [0] * 10
    gpu_csv(tmp_path / "clock.csv", [0] * 10, quiet, clocks=[1980] * 9 + [1200])
    assert disturbances.read(tmp_path / "clock.csv").causes == ("a lowered clock in 1 of 10 samples",)
    gpu_csv(tmp_path / "load.csv", [0] * 10, quiet, cores=["", *[0.2] * 8, 5.5])
    assert disturbances.read(tmp_path / "load.csv").causes == (
        "other programs on the machine's cores in 1 of 10 samples",
    )
    gpu_csv(tmp_path / "loaded.csv", [0] * 10, quiet, cores=[5.4] * 10)
    gpu_csv(tmp_path / "capped.csv", [0x4] * 10, quiet)
    for name in ("loaded.csv", "capped.csv"):
        assert disturbances.read(tmp_path / name).causes == ()
    gpu_csv(tmp_path / "once.csv", [0x4] + [0] * 9, quiet)
    assert disturbances.read(tmp_path / "once.csv").causes == ("a power cap in 1 of 10 samples",)


def test_a_cause_belongs_to_the_time_in_which_it_was_seen(tmp_path: Path) -> None:
    gpu_csv(tmp_path / "a.csv", [0x20, 0x0, 0x40], [0, 3, 0], after=[0.0, 10.0, 20.0])
    found = disturbances.read(tmp_path / "a.csv")
    assert found.during(START - 0.5, START + 0.4) == ("thermal throttling",)
    assert found.during(START + 8.0, START + 9.5) == ("another program on its GPU",)
    assert found.during(START + 3.0, START + 6.0) == ()
    assert len(found.during(START, START + 20.0)) == 3


def test_a_torn_row_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(COLUMNS) + "\nyesterday,0,fast,,,,,,software_thermal,many,\n2026-0")
    found = disturbances.read(tmp_path / "a.csv")
    assert found.causes == ("thermal throttling in 1 of 2 samples",)
    assert found.during(0.0, 1e12) == ()


def spiked(tmp_path: Path, **telemetry: Any) -> Analysis:
    """Four pairs of 24 iterations of about 1 s; iteration 11 of 02-dcp takes 3 s."""
    steady = [1.0 + 0.001 * (i % 3) for i in range(24)]
    spike = [*steady[:10], 3.0, *steady[11:]]
    times = {f"{pair:02d}-{case}": steady for pair in range(1, 5) for case in ("baseline", "dcp")}
    folder = run_folder(tmp_path, {**times, "02-dcp": spike}, spec(4, 24, 2))
    gpu_csv(folder / "launches" / "02-dcp" / "gpu.csv", **telemetry)
    return analyze_run(folder)


def test_an_iteration_that_stands_out_is_named_with_its_cause_and_counted(tmp_path: Path) -> None:
    analysis = spiked(tmp_path, reasons=[0x20, 0], foreign=[0, 0], after=[109.0, 200.0])
    (caution,) = [caution for caution in analysis.cautions if caution.startswith("02-dcp")]
    assert "iteration 11 (3.00 times: thermal throttling) stands out" in caution
    assert "thermal throttling in 1 of 2 samples" in caution
    (found,) = next(launch for launch in analysis.launches if launch.id == "02-dcp").standing_out
    assert (found.iteration, found.causes) == (11, ("thermal throttling",))
    assert found.times == pytest.approx(3.0, rel=0.01)
    assert analysis.speedup is not None
    assert analysis.speedup.by_pair[1] < 0.95


def test_a_disturbance_at_another_time_is_not_its_cause(tmp_path: Path) -> None:
    analysis = spiked(tmp_path, reasons=[0x20, 0], foreign=[0, 0], after=[200.0, 109.0])
    (caution,) = [caution for caution in analysis.cautions if caution.startswith("02-dcp")]
    assert "iteration 11 (3.00 times) stands out" in caution
    assert "thermal throttling in 1 of 2 samples" in caution


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
