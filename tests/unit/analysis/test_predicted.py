"""Which cost profile a run gets, and what its predictions rest on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcpbench import campaign
from dcpbench.analysis.predicted import profile_of
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.dcp import cost_profiles, schedulers
from dcpbench.dcp.costs import H200_1B, H200_8B
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.workload import Domain
from dcpbench.errors import SpecError
from dcpbench.plan import build
from dcpbench.runfolder.layout import RunFolder, describe
from dcpbench.spec import Spec

NONE = GpuSurvey()
H200 = GpuSurvey(gpus=(Gpu(name="0", model="NVIDIA H200"),))


def spec(costs: str, **fields: object) -> Spec:
    return Spec.model_validate({"schedule": {"costs": costs}, "topology": {"device": "cpu"}, **fields})


def test_a_run_keeps_the_profile_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = campaign.costs_of(spec("h200-8b"), folder, NONE, resume=False)
    assert first is not None
    launches = build(spec("h200-8b"), tmp_path, first)
    assert {launch.costs for launch in launches} == {first}
    describe(folder, spec("h200-8b"), launches)
    assert profile_of(tmp_path) == first
    resumed = campaign.costs_of(spec("h200-1b"), folder, NONE, resume=True)
    assert resumed == first
    assert campaign.costs_of(spec("h200-1b"), folder, NONE, resume=False) != first


def test_a_profile_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no cost profile 'nowhere'"):
        campaign.costs_of(spec("nowhere"), RunFolder(tmp_path), NONE, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_another_trainer_plans_by_itself(tmp_path: Path) -> None:
    made = spec("h200-1b", runner="megatron_lm")
    assert campaign.costs_of(made, RunFolder(tmp_path), NONE, resume=False) is None
    assert profile_of(tmp_path) is None


def test_ranks_compute_on_what_the_driver_names() -> None:
    assert campaign.device_name(spec("auto"), H200) == "cpu"
    assert campaign.device_name(Spec.model_validate({"topology": {"device": "cuda"}}), H200) == "NVIDIA H200"


@pytest.mark.parametrize("policy", ["minimal", "megatron"])
def test_only_a_scheduler_with_a_cost_model_plans_with_the_profile(policy: str) -> None:
    for name in schedulers.SCHEDULERS:
        domain = Domain(4, 4)
        made = schedulers.create(name, domain=domain, capacity=512, padding_policy=policy, cost=H200_8B)  # type: ignore[arg-type]
        without = schedulers.create(name, domain=domain, capacity=512, padding_policy=policy)  # type: ignore[arg-type]
        assert schedulers.plans_with_costs(name) is isinstance(made, Laminar)
        assert made.padding == without.padding
        if isinstance(made, Laminar):
            assert isinstance(without, Laminar)
            assert (made.cost, without.cost) == (H200_8B, H200_1B)
        else:
            assert made == without


def test_the_assumed_profile_of_a_run_gives_no_predictions(tmp_path: Path) -> None:
    found = campaign.costs_of(spec("auto"), RunFolder(tmp_path), NONE, resume=False)
    assert found is not None
    if found.kind == "assumed":  # unless this machine was calibrated for the default spec
        assert found == cost_profiles.assumed(spec("auto"))
        assert found.basis == "assumed profile assumed-h200"
