"""Cost profiles: read back equal, matched by what they depend on, refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dcpbench import config
from dcpbench.dcp import cost_profiles
from dcpbench.dcp.cost_profiles import CostProfile, Fit, Iteration, coefficients_of, key_of, load, resolve
from dcpbench.dcp.costs import H200_1B, H200_8B, LongKernel
from dcpbench.errors import SpecError
from dcpbench.planner import command as plan_command
from dcpbench.spec import Spec

H200 = "NVIDIA H200"


def spec(costs: str = "auto", **training: object) -> Spec:
    return Spec.model_validate({"schedule": {"costs": costs}, "training": training})


def profile(of: Spec, name: str = "mine", gpu: str = H200, refused: str | None = None, torch: str = "") -> CostProfile:
    key = key_of(of, gpu)
    if torch:
        key = key.model_copy(update={"versions": {"torch": torch}})
    cost = replace(H200_1B, floor=0.03, floor_shared=0.035, overlap=0.25)
    return CostProfile(
        name=name,
        kind="measured",
        key=key,
        coefficients=coefficients_of(cost),
        iteration=Iteration(seconds=0.02, iterations=7, mape=0.01),
        fit=Fit(points=20, held_out=8, mape=0.01, p95=0.02, fitted_mape=0.01, refused=refused),
    )


def put(folder: Path, *made: CostProfile) -> Path:
    folder.mkdir(exist_ok=True)
    for one in made:
        (folder / f"{one.name}.json").write_text(cost_profiles.dump(one))
    return folder


def test_a_profile_is_read_back_equal(tmp_path: Path) -> None:
    made = profile(spec())
    put(tmp_path, made)
    assert load(tmp_path / "mine.json") == made
    cost = made.cost
    assert (cost.floor, cost.floor_shared, cost.overlap, cost.assumed) == (0.03, 0.035, 0.25, False)
    assert replace(cost, name="h200-1b", assumed=True, floor=0, floor_shared=0, overlap=1) == H200_1B
    assert made.iteration_seconds == 0.02
    assert made.basis == "measured profile mine"


def test_shipped_profiles_hold_the_assumed_coefficients_and_say_so() -> None:
    shipped = {one.name: one for one in cost_profiles.profiles([cost_profiles.SHIPPED])}
    assert shipped["h200-1b"].cost == H200_1B
    assert shipped["h200-8b"].cost == H200_8B
    for one in shipped.values():
        assert one.kind == "assumed" or (one.key is not None and one.fit is not None and one.refused is None)
    assert shipped["h200-1b"].basis == "assumed profile h200-1b"
    assert shipped["h200-1b"].iteration_seconds == 0.0


def test_auto_takes_a_measured_profile_of_the_same_model_and_gpu_only(tmp_path: Path) -> None:
    folder = put(tmp_path, profile(spec()))
    assert resolve(spec(), H200, [folder]).name == "mine"
    for other, gpu in (
        (spec(), "NVIDIA H100"),
        (spec(recompute="full"), H200),
        (spec(deterministic=True), H200),
        (spec(dtype="float32"), H200),
        (Spec.model_validate({"model": {"layers": 3}}), H200),
        (Spec.model_validate({"cases": {"attention": "flash"}}), H200),
    ):
        found = resolve(other, gpu, [folder])
        assert (found.name, found.kind) == ("assumed-h200", "assumed")
    assert resolve(Spec.model_validate({"model": {"kv_heads": 4, "head_dim": 16}}), H200, [folder]).name == "mine"


def test_auto_prefers_the_same_torch_and_passes_over_what_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    folder = put(tmp_path, profile(spec(), "a-old", torch="1.0"), profile(spec(), "b-poor", refused="its fit is poor"))
    assert resolve(spec(), H200, [folder]).name == "a-old"
    put(tmp_path, profile(spec(), "c-same"))
    assert resolve(spec(), H200, [folder]).name == "c-same"


def test_ranks_must_agree_on_cpu_where_they_share_cores(tmp_path: Path) -> None:
    folder = put(tmp_path, profile(spec(), gpu="cpu"))
    assert resolve(spec(), "cpu", [folder]).name == "mine"
    two = Spec.model_validate({"topology": {"gpus_per_node": 2, "cp": 2}})
    assert resolve(two, "cpu", [folder]).kind == "assumed"
    assert resolve(two, H200, [put(tmp_path / "gpu", profile(spec()))]).name == "mine"


def test_a_name_or_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = put(tmp_path / "folder", profile(spec()))
    assert resolve(spec("mine"), "cpu", [folder]).name == "mine"
    assert resolve(spec(str(folder / "mine.json")), "cpu", []).name == "mine"
    assert resolve(spec("h200-8b"), "cpu").cost == H200_8B


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = put(tmp_path / "folder", profile(spec(), "poor", refused="its fit is poor: far off"))
    with pytest.raises(SpecError, match=r"schedule.costs: poor cannot be used: its fit is poor: far off"):
        resolve(spec("poor"), H200, [folder])
    with pytest.raises(SpecError, match=r"no cost profile 'other'; known: auto, poor, or give the path"):
        resolve(spec("other"), H200, [folder])
    with pytest.raises(SpecError, match=r"nowhere.json cannot be read: No such file"):
        resolve(spec(str(tmp_path / "nowhere.json")), H200)
    content = json.loads((folder / "poor.json").read_text())
    content["coefficients"]["token"] = -1
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(
        SpecError, match=r"bad.json is no cost profile: coefficients.token: greater than; make one with"
    ):
        load(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(SpecError, match=r"is no cost profile: the file: model type"):
        load(tmp_path / "bad.json")


def test_assumed_coefficients_follow_the_model() -> None:
    shape = {"hidden_size": 2048, "ffn_hidden_size": 8192, "attention_heads": 32, "kv_heads": 8, "vocab_size": 128256}
    model = Spec.model_validate({"model": {"layers": 16, **shape}})
    assert cost_profiles.matrix_parameters(model) == pytest.approx(1.24e9, rel=0.01)
    cost = cost_profiles.assumed(model).cost
    assert cost.assumed
    assert cost.token == pytest.approx(H200_1B.token, rel=0.01)
    assert cost.square == H200_1B.square
    assert cost.hop_bytes == H200_1B.hop_bytes


def test_the_users_folder_follows_xdg(tmp_path: Path) -> None:
    assert cost_profiles.user_folder({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "dcpbench" / "profiles"


def test_file_names_tell_what_was_measured() -> None:
    key = key_of(spec(recompute="full", deterministic=True), "cpu").model_copy(
        update={"versions": {"torch": "2.11.0+cpu"}}
    )
    assert key.stem == f"cpu-{key.model_hash}-float32-auto-full-deterministic-4-ranks-torch-2.11.0-cpu"


def test_a_profile_measured_up_to_the_capacity_is_preferred(tmp_path: Path) -> None:
    short, long = profile(spec(), "a-short"), profile(spec(), "b-long")
    assert short.fit is not None
    short = short.model_copy(update={"fit": short.fit.model_copy(update={"most_tokens": 256})})
    long = long.model_copy(update={"fit": short.fit.model_copy(update={"most_tokens": 65536})})
    folder = put(tmp_path, short, long)
    assert resolve(spec(), H200, [folder]).name == "b-long"
    few = Spec.model_validate({"cases": {"max_seqlen_per_dp_cp_rank": 128}})
    assert resolve(few, H200, [folder]).name == "a-short"


def test_a_second_attention_kernel_is_read_back(tmp_path: Path) -> None:
    two = replace(H200_1B, long=LongKernel(3e-10, 700.0, 16e6))
    made = profile(spec()).model_copy(update={"coefficients": coefficients_of(two)})
    put(tmp_path, made)
    assert load(tmp_path / "mine.json").cost.long == two.long


@pytest.mark.parametrize("name", ["mock_2xh200", "long_2xh200"])
def test_the_shipped_measurement_serves_the_shipped_specs(name: str) -> None:
    shipped = config.load(Path(__file__).parents[3] / "configs" / f"{name}.yaml", environ={}).spec
    found = resolve(shipped, H200, [cost_profiles.SHIPPED])
    assert (found.kind, found.name, found.refused) == ("measured", "h200-gpt-0.87b", None)
    assert found.fit is not None
    assert found.fit.mape < 0.03
    assert (found.fit.most_tokens or 0) >= 0.9 * shipped.cases.max_seqlen_per_dp_cp_rank
    assert name in found.description
    assert found.cost.long is not None
    assert found.cost.long.square < found.cost.square


# Means of iterations 11 to 30 (short) and 11 to 25 (long) of the runs that the profile was fitted to, in ms.
MEASURED = {
    ("mock_2xh200", 30): {"dp_balanced": 178.8, "default_dynamic_cp": 168.5},
    ("long_2xh200", 25): {"dp_balanced": 792.0, "default_dynamic_cp": 786.4},
}


@pytest.mark.parametrize(("name", "iterations"), list(MEASURED))
def test_plans_of_the_shipped_specs_take_as_long_as_they_were_measured_to(name: str, iterations: int) -> None:
    shipped = config.load(Path(__file__).parents[3] / "configs" / f"{name}.yaml", environ={}).spec
    training = shipped.training.model_copy(update={"iterations": iterations})
    asked = shipped.model_copy(
        update={"training": training, "schedule": shipped.schedule.model_copy(update={"costs": "h200-gpt-0.87b"})}
    )
    comparison, facts = plan_command.plan(asked, plan_command.Question(schedulers="dp_balanced,default_dynamic_cp"))
    for row in comparison.rows:
        assert row.mean_ms == pytest.approx(MEASURED[name, iterations][row.setting.scheduler], rel=0.02)
    assert "measured profile h200-gpt-0.87b" in facts.basis
    assert "extrapolated" not in facts.basis
