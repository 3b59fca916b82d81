"""GPU samples beside a launch, with an object that answers like NVML."""

from __future__ import annotations

import csv
import os
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dcpbench import telemetry
from dcpbench.telemetry import COLUMNS, gpu_handles, sample, sampling, throttle_names


class FakeNvml:
    """Two GPUs; the second has no power sensor, as some boards."""

    class NVMLError(Exception):
        pass

    def __init__(self, pids: tuple[int, ...] = ()) -> None:
        self.pids = pids

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        if name != "GPU-b":
            raise self.NVMLError
        return "gpu1"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        if handle == "gpu1":
            raise self.NVMLError
        return 654321

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0x4 | 0x20

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def test_one_row_per_gpu() -> None:
    nvml = FakeNvml(pids=(11, 12, 99))
    rows = sample(nvml, gpu_handles(nvml, 8, None), lambda: {11, 12})
    named = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [row["gpu"] for row in named] == ["0", "1"]
    first = named[0]
    assert first["sm_clock_mhz"] == 1980
    assert first["memory_clock_mhz"] == 2619
    assert first["power_w"] == 654.321
    assert first["temperature_c"] == 61
    assert first["utilisation_percent"] == 97
    assert first["memory_used_mib"] == 3072.0
    assert first["throttle_reasons"] == "software_power_cap+software_thermal"
    assert first["foreign_processes"] == 1
    assert named[1]["power_w"] is None


@pytest.mark.parametrize(("pids", "expected"), [((), 0), ((7,), 0), ((7, 8, 9), 2), ((8, 9), None)])
def test_foreign_processes_are_counted_only_where_ours_are_recognised(
    pids: tuple[int, ...], expected: int | None
) -> None:
    nvml = FakeNvml(pids=pids)
    assert sample(nvml, [("0", "gpu0")], lambda: {7})[0][COLUMNS.index("foreign_processes")] == expected


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        (None, 1, ["0"]),
        (None, 8, ["0", "1"]),
        ("1", 1, ["1"]),
        ("1,0", 2, ["1", "0"]),
        ("GPU-b", 1, ["GPU-b"]),
        ("0,7,1", 3, ["0"]),
        ("", 2, []),
    ],
)
def test_only_the_gpus_of_the_launch_are_sampled(visible: str | None, ranks: int, expected: list[str]) -> None:
    assert [name for name, _ in gpu_handles(FakeNvml(), ranks, visible)] == expected


def test_samples_are_written_while_the_block_runs(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    nvml = FakeNvml(pids=(os.getpid(),))
    with sampling(path, 2, {}, nvml=nvml, interval=0.01):
        while not path.exists() or len(path.read_text().splitlines()) < 5:
            time.sleep(0.01)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {row["gpu"] for row in rows} == {"0", "1"}
    assert {row["foreign_processes"] for row in rows} == {"0"}
    size = path.stat().st_size
    time.sleep(0.05)
    assert path.stat().st_size == size


def test_no_nvml_no_file_no_error(tmp_path: Path) -> None:
    with sampling(tmp_path / "gpu.csv", 2, {}, nvml=None):
        pass
    with sampling(tmp_path / "gpu.csv", 2, {"CUDA_VISIBLE_DEVICES": ""}, nvml=FakeNvml()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_missing_package_or_driver_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_driver() -> None:
        raise NVMLError

    broken = SimpleNamespace(nvmlInit=no_driver, NVMLError=NVMLError)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", broken)
    assert telemetry.load_nvml() is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert telemetry.load_nvml() is None


def test_throttle_bits() -> None:
    assert throttle_names(0) == ""
    assert throttle_names(0x1) == "idle"
    assert throttle_names(0x48) == "hardware_slowdown+hardware_thermal"
    assert throttle_names(0x1004) == "software_power_cap+0x1000"


def test_cores_that_other_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds in which the machine was busy for 12 s of core time, 4 s of which were ours: 4 other cores."""
    Times = namedtuple("Times", "user system idle guest")
    machine = iter([Times(100.0, 10.0, 50.0, 5.0), Times(110.0, 12.0, 60.0, 8.0)])
    clock = iter([10.0, 12.0])
    ours = {7: iter([(20.0, 1.0), (23.0, 2.0)]), 8: iter([(1.0, 0.0)])}

    def process(pid: int) -> Any:
        def cpu_times() -> Any:
            try:
                user, system = next(ours[pid])
            except StopIteration:
                raise psutil.NoSuchProcess(pid) from None
            return SimpleNamespace(user=user, system=system)

        return SimpleNamespace(cpu_times=cpu_times)

    monkeypatch.setattr(telemetry.psutil, "cpu_times", lambda: next(machine))
    monkeypatch.setattr(telemetry.psutil, "Process", process)
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: next(clock))
    cores = telemetry.OtherCores()
    assert cores({7, 8}) is None
    assert cores({7, 8}) == 4.0
