"""Which GPUs this machine lends to CUDA, and what they are doing. Asks the driver; never loads torch.

Through `pynvml` where it is installed, else through `nvidia-smi`, else there are none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpbench.telemetry import gpu_handles, load_nvml

_LIMIT = 20.0
"""Seconds for one call of nvidia-smi; a driver in trouble can make it hang."""
_MAX_LINKS = 18
"""NVML_NVLINK_MAX_LINKS of nvml.h."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device. `processes` counts compute processes of anybody; None where the driver does not say."""

    name: str
    """Index or UUID, as CUDA_VISIBLE_DEVICES has it."""
    model: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSurvey:
    """The GPUs that CUDA will use, in its order, and what they have in common."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    interconnect: str | None = None


def survey(environ: Mapping[str, str]) -> GpuSurvey:
    """The GPUs that a process with this environment would see (`CUDA_VISIBLE_DEVICES`)."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    nvml = load_nvml()
    return _by_smi(visible) if nvml is None else by_nvml(nvml, visible)


def by_nvml(nvml: Any, visible: str | None) -> GpuSurvey:
    """Ask the initialised `pynvml` module."""

    def ask(function: str, *arguments: Any) -> Any:
        # Old bindings lack functions, and virtual GPUs answers; neither is a reason to stop.
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    gpus: list[Gpu] = []
    links: set[str] = set()
    for name, handle in gpu_handles(nvml, ask("nvmlDeviceGetCount") or 0, visible):
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        gpus.append(
            Gpu(
                name=name,
                model=_text(ask("nvmlDeviceGetName", handle)) or "unknown",
                memory_bytes=getattr(memory, "total", None),
                used_bytes=getattr(memory, "used", None),
                processes=None if processes is None else len(processes),
            )
        )
        active = sum(ask("nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(_MAX_LINKS))
        generation = ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
        if active:
            links.add(f"NVLink, {active} links")
        elif generation and width:
            links.add(f"PCIe {generation}.0 x{width}")
    driver = _text(ask("nvmlSystemGetDriverVersion")) if gpus else None
    return GpuSurvey(gpus=tuple(gpus), driver=driver, interconnect=" / ".join(sorted(links)) or None)


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):  # bindings before version 11.5
        return value.decode(errors="replace")
    return None if value is None else str(value)


def _by_smi(visible: str | None) -> GpuSurvey:
    fields = "index,uuid,name,memory.total,memory.used,driver_version"
    listing = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listing is None:
        return GpuSurvey()
    return from_smi(
        listing, _smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"), _smi("topo", "-m"), visible
    )


def from_smi(listing: str, processes: str | None, topology: str | None, visible: str | None) -> GpuSurvey:
    """The survey from what nvidia-smi printed: its GPU query, its compute processes, its topology matrix."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.count(",") == 5]
    apps = [line.split(",")[0].strip() for line in (processes or "").splitlines() if "," in line]
    chosen = _visible([row[:2] for row in rows], visible)
    gpus = [
        Gpu(
            name=name,
            model=rows[place][2],
            memory_bytes=_mebibytes(rows[place][3]),
            used_bytes=_mebibytes(rows[place][4]),
            processes=None if processes is None else apps.count(rows[place][1]),
        )
        for name, place in chosen
    ]
    links = set(re.findall(r"\bNV(\d+)\b", topology or ""))
    others = [
        word for word in ("PIX", "PXB", "PHB", "NODE", "SYS") if re.search(rf"^GPU.*\b{word}\b", topology or "", re.M)
    ]
    interconnect = f"NVLink, {'/'.join(sorted(links))} links" if links else f"PCIe ({others[-1]})" if others else None
    return GpuSurvey(
        gpus=tuple(gpus), driver=rows[chosen[0][1]][5] if chosen else None, interconnect=interconnect if gpus else None
    )


def _visible(gpus: Sequence[Sequence[str]], visible: str | None) -> list[tuple[str, int]]:
    """(name, place in the list) by CUDA's rule: what follows an invalid entry does not count."""
    if visible is None:
        return [(row[0], place) for place, row in enumerate(gpus)]
    chosen: list[tuple[str, int]] = []
    for name in (part.strip() for part in visible.split(",")):
        place = next(
            (n for n, (index, uuid) in enumerate(gpus) if name == index or (len(name) > 4 and uuid.startswith(name))),
            None,
        )
        if place is None:
            break
        chosen.append((name, place))
    return chosen


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
