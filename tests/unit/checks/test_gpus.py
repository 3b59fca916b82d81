"""What the driver says, through both of its doors, without a driver."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from dcpbench.checks import gpus
from dcpbench.checks.gpus import Gpu, GpuSurvey

LISTING = """\
0, GPU-aaaa1111, NVIDIA H200, 143771, 4, 580.95.05
1, GPU-bbbb2222, NVIDIA H200, 143771, 71885, 580.95.05
"""
PROCESSES = "GPU-bbbb2222, 4242\nGPU-bbbb2222, 4243\n"
TOPOLOGY = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\t0-31\t0
GPU1\tNV18\t X \t0-31\t0

Legend:
  SYS  = Connection traversing PCIe
  NV#  = Connection traversing a bonded set of # NVLinks
"""


class FakeNvml:
    """Two devices; the functions that an old binding lacks are absent."""

    class NVMLError(Exception):
        pass

    def __init__(self, links: int = 18) -> None:
        self.links = links

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "GPU-bbbb2222":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(total=143771 * 2**20, used=4 * 2**20 + handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=4242)] * handle

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= 18:
            raise self.NVMLError
        return int(link < self.links)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.95.05"


def test_nvml() -> None:
    found = gpus.by_nvml(FakeNvml(), None)
    assert [gpu.processes for gpu in found.gpus] == [0, 1]
    assert found.gpus[0] == Gpu(
        name="0", model="NVIDIA H200", memory_bytes=143771 * 2**20, used_bytes=4 * 2**20, processes=0
    )
    assert (found.driver, found.interconnect) == ("580.95.05", "NVLink, 18 links")
    assert gpus.by_nvml(FakeNvml(links=0), None).interconnect == "PCIe 5.0 x16"


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["1"]), ("1,0", ["1", "0"]), ("", []), ("-1", []), ("0,7,1", ["0"]), ("GPU-bbbb2222", ["GPU-bbbb2222"])],
)
def test_visible_devices(visible: str, names: list[str]) -> None:
    by_nvml = gpus.by_nvml(FakeNvml(), visible)
    by_smi = gpus.from_smi(LISTING, PROCESSES, TOPOLOGY, visible)
    assert [gpu.name for gpu in by_nvml.gpus] == [gpu.name for gpu in by_smi.gpus] == names
    assert (by_nvml.driver is None) == (by_smi.driver is None) == (not names)


class OldNvml(FakeNvml):
    """A binding and a virtual GPU that answer little."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetMemoryInfo"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        raise self.NVMLError


def test_nvml_that_answers_little() -> None:
    found = gpus.by_nvml(OldNvml(), None)
    assert found.gpus[0] == Gpu(name="0", model="NVIDIA H200")
    assert found.interconnect is None


def test_nvidia_smi() -> None:
    found = gpus.from_smi(LISTING, PROCESSES, TOPOLOGY, None)
    assert found == GpuSurvey(
        gpus=(
            Gpu(name="0", model="NVIDIA H200", memory_bytes=143771 * 2**20, used_bytes=4 * 2**20, processes=0),
            Gpu(name="1", model="NVIDIA H200", memory_bytes=143771 * 2**20, used_bytes=71885 * 2**20, processes=2),
        ),
        driver="580.95.05",
        interconnect="NVLink, 18 links",
    )
    assert gpus.from_smi(LISTING, None, TOPOLOGY.replace("NV18", "PHB"), None).interconnect == "PCIe (PHB)"
    assert gpus.from_smi(LISTING, None, None, None).gpus[1].processes is None
    assert gpus.from_smi("No devices were found\n", None, None, None) == GpuSurvey()


def test_neither_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(gpus, "load_nvml", lambda: None)
    monkeypatch.setattr(subprocess, "run", missing)
    assert gpus.survey({}) == GpuSurvey()


def test_nvidia_smi_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(gpus, "load_nvml", lambda: None)
    monkeypatch.setattr(subprocess, "run", hang)
    assert gpus.survey({}) == GpuSurvey()


def test_survey_through_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--query-gpu": LISTING, "--query-compute-apps": PROCESSES, "topo": TOPOLOGY}

    def run(argv: list[str], **_: Any) -> Any:
        assert argv[0] == "nvidia-smi"
        return SimpleNamespace(stdout=answers[argv[1].partition("=")[0]])

    monkeypatch.setattr(gpus, "load_nvml", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpus.survey({"CUDA_VISIBLE_DEVICES": "1"}).gpus[0].processes == 2
