"""What the GPUs did while a launch ran: clocks, power, heat, throttling, foreign processes; and the machine's cores.

One thread asks NVML about once a second and appends to `gpu.csv`. NVML reads counters that the
driver keeps anyway; it starts no kernel and waits for none, so the launch is not disturbed. Where
there is no NVML there is no file; a question that a GPU does not answer leaves its cell empty.
"""

from __future__ import annotations

import csv
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

_BOUND = 5.0
"""Seconds a launch waits for the thread to end; a driver that hangs must not hang the run."""

THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "software_power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "software_thermal",
    0x040: "hardware_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's clock event reasons (`nvmlClocksEventReason*` of nvml.h)."""

COLUMNS = (
    "time",
    "gpu",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "temperature_c",
    "utilisation_percent",
    "memory_used_mib",
    "throttle_reasons",
    "foreign_processes",
    "other_cpu_cores",
)


def load_nvml() -> Any | None:
    """The initialised `pynvml` module, or None where the package, the driver or a GPU is missing."""
    try:
        import pynvml  # noqa: PLC0415 - optional, and only of use on a machine with GPUs
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@contextmanager
def sampling(
    path: Path, ranks: int, environ: Mapping[str, str], *, nvml: Any | None, interval: float = 1.0
) -> Iterator[None]:
    """Sample into the CSV file `path` while the block runs; nothing happens where `nvml` is None.

    Args:
        path: must not exist yet.
        ranks: how many GPUs the launch uses.
        environ: `CUDA_VISIBLE_DEVICES` says which.
        nvml: see `load_nvml`.
        interval: seconds between two samples.
    """
    handles = [] if nvml is None else gpu_handles(nvml, ranks, environ.get("CUDA_VISIBLE_DEVICES"))
    if not handles:
        yield
        return
    finished = threading.Event()

    def work() -> None:
        with path.open("x", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            cores = OtherCores()
            while True:
                writer.writerows(sample(nvml, handles, _own_processes, cores))
                file.flush()
                if finished.wait(interval):
                    return

    thread = threading.Thread(target=work, name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(_BOUND)


def gpu_handles(nvml: Any, ranks: int, visible: str | None) -> list[tuple[str, Any]]:
    """(name, NVML handle) of the first `ranks` GPUs that CUDA will use.

    Args:
        nvml: see `load_nvml`.
        ranks: number of GPUs wanted; there may be fewer.
        visible: value of `CUDA_VISIBLE_DEVICES`: indices or UUIDs; None for all.
    """
    count = nvml.nvmlDeviceGetCount()
    names = [str(i) for i in range(count)] if visible is None else [n.strip() for n in visible.split(",") if n.strip()]
    handles: list[tuple[str, Any]] = []
    for name in names[:ranks]:
        if name.isdigit():
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", int(name)) if int(name) < count else None
        else:
            handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", name)
        if handle is None:
            break  # CUDA, too, ignores what follows an invalid entry
        handles.append((name, handle))
    return handles


def sample(
    nvml: Any,
    handles: list[tuple[str, Any]],
    own: Callable[[], set[int]],
    cores: Callable[[set[int]], float | None] = lambda _: None,
) -> list[list[object]]:
    """One row of `COLUMNS` per GPU; None where there is no answer."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    ours = own()
    others = cores(ours)
    return [[now, name, *(read(nvml, handle) for read in _READINGS), _foreign(nvml, handle, ours), others]
            for name, handle in handles]  # fmt: skip


class OtherCores:
    """How many of the machine's cores other programs have used since it was asked last."""

    def __init__(self) -> None:
        self._before: tuple[float, float, dict[int, float]] | None = None

    def __call__(self, ours: set[int]) -> float | None:
        """Cores' worth of time, 0.01 the finest; None for the first question, to which there is no before.

        Args:
            ours: ids of our own processes.
        """
        times = psutil.cpu_times()
        # A guest's time is in that of its user already.
        idle = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        used = {pid: seconds for pid in ours if (seconds := _cpu_seconds(pid)) is not None}
        now = (time.monotonic(), sum(times) - idle, used)
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        own = sum(seconds - before[2].get(pid, seconds) for pid, seconds in used.items())
        return round(max(0.0, now[1] - before[1] - own) / (now[0] - before[0]), 2)


def _cpu_seconds(pid: int) -> float | None:
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(used.user + used.system)


def throttle_names(bits: int) -> str:
    """The reasons of a bit mask, joined by `+`; unknown bits as a number."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return "+".join(names + ([hex(rest)] if rest else []))


def _ask(nvml: Any, function: str, *arguments: Any) -> Any | None:
    # Old bindings lack functions, GPUs lack sensors; neither is worth a launch.
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _clock(kind: int) -> Callable[[Any, Any], int | None]:
    return lambda nvml, handle: _ask(nvml, "nvmlDeviceGetClockInfo", handle, kind)


def _power(nvml: Any, handle: Any) -> float | None:
    milliwatts = _ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    return None if milliwatts is None else milliwatts / 1000


def _temperature(nvml: Any, handle: Any) -> int | None:
    return _ask(nvml, "nvmlDeviceGetTemperature", handle, 0)  # 0: NVML_TEMPERATURE_GPU, the only sensor


def _utilisation(nvml: Any, handle: Any) -> int | None:
    return getattr(_ask(nvml, "nvmlDeviceGetUtilizationRates", handle), "gpu", None)


def _memory(nvml: Any, handle: Any) -> float | None:
    used = getattr(_ask(nvml, "nvmlDeviceGetMemoryInfo", handle), "used", None)
    return None if used is None else round(used / 2**20, 1)


def _throttle(nvml: Any, handle: Any) -> str | None:
    bits = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # the name before driver 535
        bits = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else throttle_names(bits)


_READINGS: tuple[Callable[[Any, Any], object], ...] = (
    _clock(1),  # NVML_CLOCK_SM
    _clock(2),  # NVML_CLOCK_MEM
    _power,
    _temperature,
    _utilisation,
    _memory,
    _throttle,
)


def _foreign(nvml: Any, handle: Any, ours: set[int]) -> int | None:
    """Compute processes on a GPU that are not ours.

    None while none of ours is among them: inside a container NVML may give the host's process ids,
    and then nobody can tell whose they are.
    """
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if processes is None:
        return None
    found = {process.pid for process in processes}
    return len(found - ours) if found & ours or not found else None


def _own_processes() -> set[int]:
    me = psutil.Process(os.getpid())
    return {me.pid, *(child.pid for child in me.children(recursive=True))}
