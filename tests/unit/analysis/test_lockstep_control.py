"""The A/A control of lockstep: when it is made, what it computes, and what the report learns from it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_lines import header, jsonl, record, spec, write

from dcpbench import campaign, config, plan, records, report
from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.commands import resolve
from dcpbench.errors import ExitCode, Interrupted
from dcpbench.launch import LaunchOutcome, Status
from dcpbench.launching.interrupts import Interrupts
from dcpbench.plan import LOCKSTEP_CONTROL, Launch, places
from dcpbench.records import IterationRecord, RunEnd, to_json
from dcpbench.report import ci, statistics_json
from dcpbench.report.statistics_json import nulls
from dcpbench.runfolder import history, launched, ledger
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder.layout import RunFolder
from dcpbench.settings import resources
from dcpbench.spec import Spec

ITERATIONS = 30


def a_spec(mode: str = "lockstep", launches: int = 1, control: str = "auto", **changes: Any) -> Spec:
    base = spec(iterations=ITERATIONS).model_dump()
    return Spec.model_validate(
        {**base, "mode": mode, "lockstep": {"launches": launches, "control": control}, **changes}
    )


SAME = {"cases": {"dcp": {"scheduler": "dp_balanced"}}}


@pytest.mark.parametrize(
    ("made_of", "made"),
    [
        (a_spec(), True),
        (a_spec(launches=3), True),
        (a_spec(control="never"), False),
        (a_spec(**SAME), False),
        (a_spec(control="always", **SAME), True),
        (a_spec(mode="launches", control="always"), False),
    ],
)
def test_which_runs_have_one(made_of: Spec, made: bool, tmp_path: Path) -> None:
    launches = plan.build(made_of, tmp_path)
    control = plan.lockstep_control(launches)
    assert (control is not None) == made
    if made:
        assert plan.control(launches, cpu=True) == control


def test_both_sides_are_the_baseline_and_all_else_is_the_same(tmp_path: Path) -> None:
    training = {**spec(iterations=ITERATIONS).training.model_dump(), "save_path": str(tmp_path / "weights")}
    own = a_spec(launches=2, training=training)
    launches = plan.build(own, tmp_path)
    control = plan.lockstep_control(launches)
    assert control is not None
    assert (control.id, control.case, control.pair, control.position) == (LOCKSTEP_CONTROL, "lockstep", 0, 3)
    assert control.folder.name == LOCKSTEP_CONTROL
    assert control.spec.cases == own.cases.model_copy(update={"dcp": own.cases.baseline})
    assert control.spec.training == own.training.model_copy(update={"save_path": None})
    unchanged = {"cases": own.cases, "training": own.training}
    assert control.spec.model_copy(update=unchanged) == own
    assert plan.command(control).argv[-3:] == ["-m", "dcpbench.worker", str(control.file)]


@pytest.mark.parametrize("order", ["balanced", "baseline_first", "dcp_first"])
def test_its_order_is_that_of_the_first_launch(order: str) -> None:
    assert [places(order, 0, i) for i in range(1, 9)] == [places(order, 1, i) for i in range(1, 9)]


def test_a_quick_look_makes_none_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.isupper() and name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    path = tmp_path / "spec.yaml"
    path.write_text("mode: lockstep\n")
    quick = {"launches.pairs": ("--quick", 2)}
    found = resolve(path, (), quick)
    assert (found.spec.lockstep.launches, found.spec.lockstep.control) == (2, "never")
    assert found.sources["lockstep.control"] == "--quick"
    assert resolve(path, ("lockstep.control=always",), quick).spec.lockstep.control == "always"
    assert resolve(path, (), {"launches.pairs": ("--pairs", 2)}).spec.lockstep.control == "auto"
    assert resolve(path, ("mode=launches",), quick).spec.lockstep.control == "auto"


def test_the_shipped_quick_spec_stays_quick_and_the_others_are_controlled(tmp_path: Path) -> None:
    names = {path.stem for path in resources.configs()} - {"gsm8k_4xcpu", "megatron_short_2xh200"}
    specs = {name: config.load(Path(name), environ={}, overrides=("mode=lockstep",)).spec for name in names}
    controlled = {name for name in names if plan.lockstep_control(plan.build(specs[name], tmp_path)) is not None}
    assert controlled == names - {"quick_4xcpu"}


class Fake:
    """Ends every launch as told."""

    def __init__(self, status: Status = "completed") -> None:
        self.status = status
        self.made: list[str] = []

    def rest(self, seconds: float) -> None: ...

    def run(self, launch: Launch) -> LaunchOutcome:
        self.made.append(launch.id)
        if self.status == "completed":
            launch.folder.mkdir(parents=True, exist_ok=True)
            rows: list[IterationRecord | RunEnd] = [
                replace(record(i, 1.0), case=case)  # type: ignore[arg-type]
                for i in range(1, ITERATIONS + 1)
                for case in places("balanced", launch.pair, i)
            ]
            launch.records.write_text(
                "".join(to_json(row) + "\n" for row in [*rows, RunEnd(iterations=ITERATIONS, seconds=60.0)])
            )
        return LaunchOutcome(launch.id, self.status, 0 if self.status == "completed" else 7, "said why", 1.0, 3)


class Silent:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def note(self, text: str) -> None:
        self.notes.append(text)


def after(folder: Path, status: Status = "completed", signals: int = 0) -> tuple[Fake, Silent]:
    """What follows the launches of a run."""
    launches = plan.build(a_spec(), folder)
    fake, silent = Fake(status), Silent()
    with Interrupts() as interrupts:
        interrupts.count = signals
        campaign.make_control(
            plan.control(launches, cpu=True),
            launches,
            ledger_file=folder / "ledger.jsonl",
            executor=fake,
            listener=silent,  # type: ignore[arg-type]
            interrupts=interrupts,
        )
    return fake, silent


def test_it_is_made_once(tmp_path: Path) -> None:
    fake, silent = after(tmp_path)
    assert fake.made == [LOCKSTEP_CONTROL]
    assert silent.notes == [f"one more lockstep launch, with the baseline on both sides (A/A): {LOCKSTEP_CONTROL}"]
    assert after(tmp_path)[0].made == []


@pytest.mark.parametrize("status", ["failed", "timeout"])
def test_one_that_fails_costs_the_run_nothing_and_is_made_again(tmp_path: Path, status: Status) -> None:
    fake, silent = after(tmp_path, status)
    assert fake.made == [LOCKSTEP_CONTROL]
    assert any(note.startswith(f"caution: {LOCKSTEP_CONTROL} said why") for note in silent.notes)
    (end,) = [entry for entry in ledger.read(tmp_path / "ledger.jsonl") if entry.event == "end"]
    assert (end.launch, end.status) == (LOCKSTEP_CONTROL, status)
    assert after(tmp_path)[0].made == [LOCKSTEP_CONTROL]
    assert (tmp_path / "launches" / LOCKSTEP_CONTROL / "records.jsonl").is_file()


def test_a_signal_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        after(tmp_path, signals=1)


Change = dict[tuple[str, int], dict[str, Any]]


def rows(seed: int, speedup: float, change: Change, noise: float, **values: Any) -> list[IterationRecord]:
    """Both sides of a launch, the second `speedup` times as fast."""
    rng = np.random.default_rng(seed)
    found = []
    for iteration in range(1, ITERATIONS + 1):
        order = places("balanced", 1, iteration)
        for case in ("baseline", "dcp"):
            seconds = float(rng.uniform(1 - noise, 1 + noise)) / (speedup if case == "dcp" else 1.0)
            own: dict[str, Any] = {
                "case": case, "order": order.index(case) + 1, "pass_seconds": 0.9 * seconds,
                "update_seconds": 0.1 * seconds, "gradient_difference": 0.0, "gradient_segment": "blocks.1",
                "gradient_sketch": (1.0, 2.0),
            }  # fmt: skip
            found.append(record(iteration, seconds, **{**own, **values, **change.get((case, iteration), {})}))
    return found


def put(launch: Launch, own: list[IterationRecord], **head: Any) -> None:
    schedulers = {"baseline": launch.spec.cases.baseline.scheduler, "dcp": launch.spec.cases.dcp.scheduler}
    first, second = (
        header(case, launch.id, ITERATIONS, mode="lockstep", scheduler=scheduler, **head)
        for case, scheduler in schedulers.items()
    )
    jsonl(launch.records, own, first)
    lines = launch.records.read_text().splitlines()
    write(launch.records, [lines[0], records.to_json(second), *lines[1:]])


def folder_of(
    folder: Path,
    aa: float | None = 1.0,
    change: Change | None = None,
    status: str = "completed",
    speedup: float = 1.3,
    own_change: Change | None = None,
    noise: float = 0.004,
    dtype: str = "bfloat16",
    device: str = "an H200",
) -> Path:
    """A run of one lockstep launch, and a control whose other side is `aa` times as fast; None: none was launched."""
    run_spec = a_spec()
    launches = plan.build(run_spec, folder)
    runfolder.describe(RunFolder(folder), run_spec, launches)
    control = plan.lockstep_control(launches)
    assert control is not None
    (launch,) = launches
    put(launch, rows(1, speedup, own_change or {}, 0.01, gradient_difference=2e-4), dtype=dtype, device=device)
    ended = [(launch.id, "completed")]
    if aa is not None:
        ended.append((control.id, status))
        put(control, rows(2, aa, change or {}, noise, peak_memory_bytes=3 * 2**19), dtype=dtype, device=device)
    for name, how in ended:
        ledger.append(folder / "ledger.jsonl", "start", name)
        code, reason = (0, None) if how == "completed" else (1, "ran out of memory")
        ledger.append(folder / "ledger.jsonl", "end", name, status=how, exit_code=code, reason=reason)
    return folder


def text_of(found: Analysis, name: str = "report.md") -> str:
    content = report.FILES[name](found)
    assert content is not None
    return content.decode()


def test_the_report_has_its_numbers_and_the_comparison_is_untouched(tmp_path: Path) -> None:
    change = {("dcp", 7): {"loss": 5.0 / 7 + 1e-6, "grad_norm": 1.5015, "gradient_difference": 3e-3,
                           "peak_memory_bytes": 3 * 2**20}}  # fmt: skip
    found, without = analyze_run(folder_of(tmp_path / "a", change=change)), analyze_run(folder_of(tmp_path / "b", None))
    control = found.lockstep_control
    assert control is not None
    assert (control.id, control.scheduler, control.position) == (LOCKSTEP_CONTROL, "dp_balanced", 2)
    assert (control.records, control.iterations, control.verdict) == (2 * ITERATIONS, ITERATIONS - 1, "equivalent")
    assert control.speedup == pytest.approx(1.0, abs=2e-3)
    assert control.interval is not None
    assert control.interval.low < 1 < control.interval.high
    assert control.order_effect == pytest.approx(1.0, abs=5e-3)
    assert control.loss_difference_max == pytest.approx(1e-6, rel=1e-6)
    assert control.grad_norm_difference_max == pytest.approx(1e-3)
    assert control.gradient_difference_max == pytest.approx(3e-3)
    assert control.memory_difference == 3 * 2**19
    assert control.baseline_beside_dcp == pytest.approx(1.0, abs=5e-3)
    assert control.baseline_memory_beside_dcp == -(2**19)
    assert without.lockstep_control is None
    for name in ("pairs", "cases", "launches", "speedup", "interval", "speed", "order_effect", "lockstep", "lengths"):
        assert getattr(found, name) == getattr(without, name), name
    assert found.verdict == without.verdict
    assert any("lockstep.control=always" in caution for caution in without.cautions)
    assert not any("lockstep.control" in caution for caution in found.cautions)


def test_the_gates_stand_on_it(tmp_path: Path) -> None:
    limits = {gate.name: gate.limit for gate in analyze_run(folder_of(tmp_path / "none", None)).parity.gates}  # type: ignore[union-attr]
    quiet = analyze_run(folder_of(tmp_path / "quiet")).parity
    assert quiet is not None
    assert {gate.name: gate.floor for gate in quiet.gates} == {"S1": 0, "S2": 0, "L4": None, "S3": 0, "S4": 0, "S5": 0}
    assert {gate.name: gate.limit for gate in quiet.gates} == limits
    noisy = {("dcp", i): {"loss": 5.0 / i * (1 + 1e-3 * (-1) ** i), "grad_norm": 1.5 + 0.03 * (-1) ** i,
                          "gradient_difference": 0.1} for i in range(1, ITERATIONS + 1)}  # fmt: skip
    apart = {("dcp", 7): {"loss": 5.0 / 7 * 1.002, "gradient_difference": 0.2}}
    refused = analyze_run(folder_of(tmp_path / "refused", own_change=apart))
    allowed = analyze_run(folder_of(tmp_path / "allowed", own_change=apart, change=noisy))
    assert refused.parity is not None
    assert allowed.parity is not None
    assert {gate.name for gate in refused.parity.failed} >= {"S1", "S5"}
    assert allowed.parity.failed == ()
    gates = {gate.name: gate for gate in allowed.parity.gates}
    assert gates["S1"].floor == pytest.approx(5e-3)
    assert (gates["S3"].floor, gates["S5"].floor) == (pytest.approx(0.02), pytest.approx(0.1))
    assert gates["S5"].limit == pytest.approx(0.3)
    assert gates["S5"].ratio == pytest.approx(2.0)
    assert not gates["S4"].enforced


@pytest.mark.parametrize(
    ("aa", "noise", "verdict", "words"),
    [
        (1.0, 0.004, "equivalent", "the two places do not differ"),
        (1.004, 0.001, "equivalent", "differ by less than the margin of 0.01"),
        (1.05, 0.004, "faster", "differ by more than the margin of 0.01"),
        (1 / 1.05, 0.004, "slower", "differ by more than the margin of 0.01"),
        (1.0, 0.1, "inconclusive", "too uncertain to tell"),
    ],
)
def test_the_judgement_is_one_sentence_everywhere(
    tmp_path: Path, aa: float, noise: float, verdict: str, words: str
) -> None:
    found = analyze_run(folder_of(tmp_path, aa, noise=noise))
    control = found.lockstep_control
    assert control is not None
    assert control.interval is not None
    assert control.verdict == verdict
    shown = f"A/A: {control.speedup:.3f} ({control.interval.low:.3f} to {control.interval.high:.3f}): "
    for name in ("report.md", "report.html"):
        assert shown in text_of(found, name)
        assert words in text_of(found, name)
    assert f"- {shown}" in ci.summary(found)
    warned = [caution for caution in found.cautions if "compared with itself in one process" in caution]
    assert len(warned) == (verdict in ("faster", "slower"))
    # It qualifies the result and fails nothing.
    assert found.verdict.exit_code == ExitCode.PASSED


@pytest.mark.parametrize(
    ("status", "change", "why"),
    [
        ("failed", {}, "aa-lockstep-baseline ran out of memory (exit code 1) (2 faults)"),
        ("completed", {("dcp", 7): {"batch_digest": "f" * 16}}, "iteration 7: batch digest"),
        ("completed", {("dcp", 7): {"loss": None}}, "iteration 7: loss missing"),
        ("completed", {("baseline", 7): {"case": None}}, "names no case"),
    ],
)
def test_one_that_cannot_be_used_is_a_caution(tmp_path: Path, status: str, change: Change, why: str) -> None:
    found = analyze_run(folder_of(tmp_path, status=status, change=change))
    assert found.lockstep_control is None
    assert (found.faults, found.verdict.exit_code) == ((), ExitCode.PASSED)
    assert [why in caution for caution in found.cautions if "A/A control cannot be used" in caution] == [True]
    assert found.parity is not None
    assert all(gate.floor is None for gate in found.parity.gates)


@pytest.mark.parametrize(("broken", "device"), [(False, "cpu"), (False, "an H200"), (True, "cpu")])
def test_statistics_give_a_reason_for_every_null(tmp_path: Path, broken: bool, device: str) -> None:
    own = {("dcp", 4): {"loss": None}} if broken else None
    document = statistics_json.document(analyze_run(folder_of(tmp_path, own_change=own, device=device)))
    json.dumps(document, allow_nan=False)
    assert (document["lockstep_control"] is None) == broken
    absent = {path for path in nulls(document) if not path.startswith("faults.")}
    assert absent == set(document["reasons"])
    if not broken:
        known = document["lockstep_control"]
        assert (known["memory_difference"] is None) == (device == "cpu")
        assert set(known["interval"]) == {"confidence", "low", "high"}


def test_few_iterations_have_no_interval(tmp_path: Path) -> None:
    found = analyze_run(folder_of(tmp_path), warmup=ITERATIONS - 3)
    document = statistics_json.document(found)
    assert document["lockstep_control"]["interval"] is None
    assert document["reasons"]["lockstep_control.interval"] == "needs at least four measured iterations"
    assert "too few iterations for an interval" in text_of(found)


def test_all_reports_are_written_twice_with_the_same_bytes_and_tell_of_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    report.write(analyze_run(folder), folder / "analysis")
    before = {path.name: path.read_bytes() for path in (folder / "analysis").iterdir()}
    report.write(analyze_run(folder), folder / "analysis")
    assert before == {path.name: path.read_bytes() for path in (folder / "analysis").iterdir()}
    assert b"aa_verdict,equivalent" in before["summary.csv"]
    for name in ("report.md", "report.html"):
        assert b"A/A control" in before[name]
        assert LOCKSTEP_CONTROL.encode() in before[name]
    (run,) = history.runs(tmp_path)
    known = json.loads(before["statistics.json"])["lockstep_control"]
    assert (run.aa, run.aa_low, run.aa_high) == (known["speedup"], known["interval"]["low"], known["interval"]["high"])
    facts = launched.launches(RunFolder(folder))
    assert [(fact.id, fact.case, fact.pair, fact.status) for fact in facts] == [
        ("01-lockstep", "lockstep", 1, "completed"),
        (LOCKSTEP_CONTROL, "lockstep", None, "completed"),
    ]
    worker = facts[1].worker
    assert worker is not None
    assert {own["scheduler"] for own in worker["cases"].values()} == {"dp_balanced"}
