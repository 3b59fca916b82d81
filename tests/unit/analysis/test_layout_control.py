"""The layout control: when it is made, what it packs, and what the gates learn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_lines import header, jsonl, record, run_folder, spec

from dcpbench import plan, report
from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.campaign import make_control, only_where_equal
from dcpbench.dcp import schedulers
from dcpbench.dcp.workload import Domain, check_plan
from dcpbench.launch import LaunchOutcome, Status
from dcpbench.launching.interrupts import Interrupts
from dcpbench.plan import LAYOUT_CONTROL, Launch
from dcpbench.records import IterationRecord, RunEnd, to_json
from dcpbench.runfolder import launched, ledger
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import Spec


def a_spec(**changes: Any) -> Spec:
    document: dict[str, Any] = {
        "training": {"iterations": 3, "warmup_iterations": 0, "dtype": changes.pop("dtype", "bfloat16")},
        "runner": changes.pop("runner", "builtin"),
        "launches": changes,
    }
    return Spec.model_validate(document)


def control_of(made: Spec, *, cpu: bool = False) -> Launch | None:
    return plan.layout_control(plan.build(made, Path("run")), cpu=cpu)


@given(st.lists(st.integers(2, 900), min_size=8, max_size=30), st.sampled_from(["dp_balanced", "default_dynamic_cp"]))
def test_the_other_layout_obeys_the_same_rules_on_the_same_samples(lengths: list[int], name: str) -> None:
    domain = Domain(4, 4)
    plain, other = (schedulers.create(n, domain=domain, capacity=512) for n in (name, f"{name}:reversed"))
    assert other.name == f"{name}:reversed"
    assert other.group_sizes() == plain.group_sizes()
    check_plan(other.plan(lengths), lengths, other.padding, 512, other.group_sizes())
    assert other.plan(lengths).cp_sizes() == plain.plan(lengths[::-1]).cp_sizes()


def test_another_layout_packs_other_samples_together() -> None:
    lengths = [900, 300, 700, 200, 1500, 100, 400, 800]
    plain, other = (
        schedulers.create(name, domain=Domain(4, 4), capacity=512) for name in ("dp_balanced", "dp_balanced:reversed")
    )
    packs = [{frozenset(job.samples) for job in found.plan(lengths).jobs} for found in (plain, other)]
    assert packs[0] != packs[1]


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({"pairs": 1}, False),
        ({"pairs": 2}, True),
        ({"pairs": 6}, True),
        ({"pairs": 6, "layout_control": "never"}, False),
        ({"pairs": 1, "layout_control": "always"}, True),
        ({"pairs": 6, "dtype": "float32"}, False),
        ({"pairs": 6, "dtype": "float32", "layout_control": "always"}, True),
    ],
)
def test_which_runs_may_have_one(changes: dict[str, Any], made: bool) -> None:
    assert (control_of(a_spec(**changes)) is not None) == made


def test_it_is_a_baseline_launch_of_no_pair_with_another_scheduler() -> None:
    made = a_spec(pairs=2)
    control = control_of(made)
    assert control is not None
    assert (control.id, control.case, control.pair, control.position) == (LAYOUT_CONTROL, "baseline", 0, 5)
    assert control.spec.cases.baseline.scheduler == "dp_balanced:reversed"
    assert control.spec.model_copy(update={"cases": made.cases}) == made
    assert not only_where_equal(control)
    assert control_of(a_spec(pairs=2, dtype="auto"), cpu=True) is None
    six = control_of(a_spec(pairs=6))
    assert six is not None
    assert only_where_equal(six)


class Fake:
    """Ends every launch as told; its losses are those of its case."""

    def __init__(self, losses: dict[str, float], status: Status = "completed") -> None:
        self.losses, self.status = losses, status
        self.made: list[str] = []

    def rest(self, seconds: float) -> None: ...

    def run(self, launch: Launch) -> LaunchOutcome:
        self.made.append(launch.id)
        if self.status == "completed":
            write(launch, 1.0)
        return LaunchOutcome(launch.id, self.status, 0 if self.status == "completed" else 7, "said why", 1.0, 3)


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def note(self, text: str) -> None:
        self.notes.append(text)


def write(launch: Launch, loss: float) -> None:
    launch.folder.mkdir(parents=True, exist_ok=True)
    rows = [IterationRecord(iteration=i, loss=loss / i, seconds=1.0) for i in (1, 2, 3)]
    launch.records.write_text("".join(to_json(row) + "\n" for row in [*rows, RunEnd(iterations=3, seconds=3.0)]))


def after(folder: Path, losses: list[float], status: Status = "completed", **changes: Any) -> tuple[Fake, Silent]:
    """What follows launches with these losses, two of each case to begin with."""
    launches = plan.build(a_spec(pairs=len(losses) // 2, **changes), folder)
    for launch, loss in zip(launches, losses, strict=True):
        write(launch, loss)
    fake, silent = Fake({}, status), Silent()
    with Interrupts() as interrupts:
        make_control(
            plan.layout_control(launches, cpu=False),
            launches,
            ledger_file=folder / "ledger.jsonl",
            executor=fake,
            listener=silent,  # type: ignore[arg-type]
            interrupts=interrupts,
        )
    return fake, silent


def test_with_three_pairs_it_is_made_where_launches_of_a_case_are_equal(tmp_path: Path) -> None:
    # baseline, dcp, dcp, baseline, baseline, dcp
    assert after(tmp_path / "equal", [5.0, 6.0, 6.0, 5.0, 5.0, 6.0])[0].made == [LAYOUT_CONTROL]
    assert after(tmp_path / "other", [5.0, 6.0, 6.0, 5.0, 5.0, 6.0001])[0].made == []
    assert after(tmp_path / "asked", [5.0, 6.0, 6.0, 5.0, 5.0, 6.0001], layout_control="always")[0].made != []


def test_one_that_fails_costs_the_run_nothing(tmp_path: Path) -> None:
    fake, silent = after(tmp_path, [5.0, 6.0, 6.0, 5.0], "failed")
    assert fake.made == [LAYOUT_CONTROL]
    assert any("layout-control said why" in note for note in silent.notes)
    (entry,) = [entry for entry in ledger.read(tmp_path / "ledger.jsonl") if entry.event == "end"]
    assert (entry.launch, entry.status) == (LAYOUT_CONTROL, "failed")


def test_a_complete_one_is_not_made_again(tmp_path: Path) -> None:
    after(tmp_path, [5.0, 6.0, 6.0, 5.0])
    assert after(tmp_path, [5.0, 6.0, 6.0, 5.0])[0].made == []


def with_control(folder: Path, shift: float, status: str = "completed", **changes: Any) -> Path:
    """A run of two pairs whose launches of a case are equal, and a control whose losses lie `shift` away."""
    same = {f"{pair:02d}-{case}": [1.0] * 6 for pair in (1, 2) for case in ("baseline", "dcp")}
    dcp = {i: {"loss": 5.0 / i + 1e-3} for i in range(1, 7)}
    made = spec(2, 6)
    made = made.model_copy(update={"training": made.training.model_copy(update={"dtype": "bfloat16"})})
    run_folder(folder, same, made, changes={"01-dcp": dcp, "02-dcp": dcp})
    rows = [record(i, 1.0, **{"loss": 5.0 / i + shift, **changes}) for i in range(1, 7)]
    head = header("baseline", LAYOUT_CONTROL, scheduler="dp_balanced:reversed")
    jsonl(folder / "launches" / LAYOUT_CONTROL / "records.jsonl", rows, head)
    ledger.append(folder / "ledger.jsonl", "start", LAYOUT_CONTROL)
    ledger.append(folder / "ledger.jsonl", "end", LAYOUT_CONTROL, status=status, exit_code=0, reason=None)
    return folder


def enforced(analysis: Analysis) -> dict[str, bool]:
    assert analysis.parity is not None
    return {gate.name: gate.enforced for gate in analysis.parity.gates}


def test_the_gates_stand_on_it_and_the_numbers_do_not(tmp_path: Path) -> None:
    folder = with_control(tmp_path, 5e-4)
    found = analyze_run(folder)
    assert found.pairs == 2
    assert len(found.launches) == 4
    assert found.control is not None
    assert (found.control.id, found.control.scheduler, found.control.position) == (
        LAYOUT_CONTROL, "dp_balanced:reversed", 5,
    )  # fmt: skip
    assert found.control.max_abs_diff == pytest.approx(5e-4)
    assert found.parity is not None
    assert [gate.floor for gate in found.parity.gates[:2]] == pytest.approx([5e-4, 5e-4])
    assert enforced(found)["L2"]
    assert found.parity.passed
    # A third of the floor: the cases differ by more than three times what another layout does.
    assert [gate.name for gate in analyze_run(with_control(tmp_path / "b", 1e-4)).parity.failed] == ["L2"]  # type: ignore[union-attr]


def test_reports_and_ledger_tell_of_it(tmp_path: Path) -> None:
    folder = with_control(tmp_path, 5e-4)
    found = analyze_run(folder)
    report.write(found, folder / "analysis")
    statistics = json.loads((folder / "analysis" / "statistics.json").read_text())
    assert statistics["layout_control"]["id"] == LAYOUT_CONTROL
    for name in ("report.md", "report.html"):
        text = (folder / "analysis" / name).read_text(encoding="utf-8")
        assert LAYOUT_CONTROL in text
        assert "takes no part in the speed-up" in text
    (fact,) = [fact for fact in launched.launches(RunFolder(folder)) if fact.id == LAYOUT_CONTROL]
    assert (fact.case, fact.pair, fact.status) == ("baseline", None, "completed")
    assert fact.worker is not None
    assert fact.worker["scheduler"] == "dp_balanced:reversed"


@pytest.mark.parametrize(
    ("status", "changes", "why"),
    [("failed", {}, "cannot be used"), ("completed", {"batch_digest": "f" * 16}, "cannot be used")],
)
def test_one_that_cannot_be_used_is_a_caution(tmp_path: Path, status: str, changes: dict[str, Any], why: str) -> None:
    folder = with_control(tmp_path, 5e-4, **changes)
    if status == "failed":
        ledger.append(folder / "ledger.jsonl", "end", LAYOUT_CONTROL, status="failed", exit_code=7, reason="said why")
    found = analyze_run(folder)
    assert found.control is None
    assert found.faults == ()
    assert not enforced(found)["L2"]
    assert any(why in caution and LAYOUT_CONTROL in caution for caution in found.cautions)
