"""One stream of records with both cases: how it is planned, split, compared, and refused where it does not belong."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_lines import header, jsonl, record, run_folder, spec, write

from dcpbench import config, plan, records, report
from dcpbench.analysis.comparison import compare
from dcpbench.analysis.pipeline import analyze_logs, analyze_run
from dcpbench.commands import resolve
from dcpbench.errors import ExitCode, SpecError, UsageError
from dcpbench.parse import parse_log
from dcpbench.plan import places
from dcpbench.records import RunEnd, RunHeader
from dcpbench.report import ci, statistics_json
from dcpbench.report.statistics_json import nulls
from dcpbench.runfolder import history, launched, ledger
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder.layout import RunFolder
from dcpbench.spec import Spec

ITERATIONS = 30


def a_spec(launches: int = 1, **changes: Any) -> Spec:
    base = spec(iterations=ITERATIONS).model_dump()
    return Spec.model_validate({**base, "mode": "lockstep", "lockstep": {"launches": launches}, **changes})


def rows(number: int, speedup: float, change: dict[tuple[str, int], dict[str, Any]]) -> list[records.IterationRecord]:
    rng = np.random.default_rng(number)
    found = []
    for iteration in range(1, ITERATIONS + 1):
        order = places("balanced", number, iteration)
        for case in ("baseline", "dcp"):
            seconds = float(rng.uniform(0.99, 1.01)) / (speedup if case == "dcp" else 1.0)
            own: dict[str, Any] = {
                "case": case, "order": order.index(case) + 1, "pass_seconds": 0.9 * seconds,
                "update_seconds": 0.1 * seconds, "gradient_difference": 2e-7, "gradient_segment": "blocks.1",
                "gradient_sketch": (1.0, 2.0),
            }  # fmt: skip
            found.append(record(iteration, seconds, **{**own, **change.get((case, iteration), {})}))
    return found


def heads(name: str, **values: Any) -> list[RunHeader]:
    return [header(case, name, ITERATIONS, mode="lockstep", **values) for case in ("baseline", "dcp")]


def lockstep_folder(
    folder: Path,
    speedup: float = 1.3,
    launches: int = 1,
    change: dict[tuple[str, int], dict[str, Any]] | None = None,
    status: str = "completed",
    run_spec: Spec | None = None,
    **head: Any,
) -> Path:
    run_spec = run_spec or a_spec(launches)
    plans = plan.build(run_spec, folder)
    runfolder.describe(RunFolder(folder), run_spec, plans)
    for launch in plans:
        ledger.append(folder / "ledger.jsonl", "start", launch.id)
        own = rows(launch.pair, speedup, change or {})
        first, second = heads(launch.id, **head)
        jsonl(launch.records, own, first)
        lines = launch.records.read_text().splitlines()
        write(launch.records, [lines[0], records.to_json(second), *lines[1:]])
        console = [records.console_header(first), records.console_header(second)]
        console += [records.console_line(row, ITERATIONS) for row in own]
        write(launch.log, [*console, records.console_end(RunEnd(iterations=ITERATIONS, seconds=1.0))])
        code, reason = (0, None) if status == "completed" else (1, "ran out of memory")
        ledger.append(folder / "ledger.jsonl", "end", launch.id, status=status, exit_code=code, reason=reason)
    return folder


def test_order_alternates_and_the_next_launch_begins_with_the_other_case() -> None:
    assert [places("balanced", 1, i)[0] for i in (1, 2, 3)] == ["baseline", "dcp", "baseline"]
    assert [places("balanced", 2, i)[0] for i in (1, 2, 3)] == ["dcp", "baseline", "dcp"]
    assert {places("baseline_first", launch, i)[0] for launch in (1, 2) for i in (1, 2)} == {"baseline"}
    assert {places("dcp_first", launch, i) for launch in (1, 2) for i in (1, 2)} == {("dcp", "baseline")}


def test_one_launch_holds_both_cases_unless_more_are_asked_for(tmp_path: Path) -> None:
    plans = plan.build(a_spec(), tmp_path)
    assert [(launch.id, launch.case, launch.pair) for launch in plans] == [("01-lockstep", "lockstep", 1)]
    assert plan.command(plans[0]).argv[-3:] == ["-m", "dcpbench.worker", str(plans[0].file)]
    assert plan.layout_control(plans, cpu=False) is None
    assert [launch.id for launch in plan.build(a_spec(3), tmp_path)] == ["01-lockstep", "02-lockstep", "03-lockstep"]


def test_pairs_on_the_command_line_are_lockstep_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.isupper() and name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)
    path = tmp_path / "spec.yaml"
    path.write_text("mode: lockstep\nlaunches: {pairs: 6}\n")
    assert resolve(path, (), {}).spec.lockstep.launches == 1
    resolved = resolve(path, (), {"launches.pairs": ("--pairs", 4)})
    assert (resolved.spec.lockstep.launches, resolved.spec.launches.pairs) == (4, 6)
    assert resolved.sources["lockstep.launches"] == "--pairs"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mode: lockstep\nrunner: megatron_lm\n", "mode lockstep needs the built-in worker"),
        ("mode: lockstep\ntraining: {profile_iterations: [3]}\n", "profile_iterations"),
        ("mode: both\n", "mode"),
    ],
)
def test_what_lockstep_cannot_do_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=words) as error:
        config.load(path, environ={})
    assert str(error.value).startswith("spec.yaml")


def test_a_run_becomes_two_series_and_a_verdict(tmp_path: Path) -> None:
    result = analyze_run(lockstep_folder(tmp_path))
    assert result.verdict.exit_code == ExitCode.PASSED
    assert (result.mode, result.speed, result.pairs) == ("lockstep", "faster", 1)
    assert result.speedup is not None
    assert result.speedup.total == pytest.approx(1.3, rel=0.01)
    assert result.interval is not None
    assert result.interval.low < 1.3 < result.interval.high
    assert result.lockstep is not None
    assert result.lockstep.paired is not None
    assert result.lockstep.paired.iterations == ITERATIONS - 1
    assert result.lockstep.gradient_difference_max == 2e-7
    assert result.lockstep.gradient_segment == "blocks.1"
    assert result.lockstep.update_ms == pytest.approx(100, rel=0.02)
    assert result.order_effect == pytest.approx(1.0, abs=0.01)
    assert [launch.records for launch in result.launches] == [ITERATIONS, ITERATIONS]
    assert not any("indicative" in caution for caution in result.cautions)
    assert any("one process" in caution for caution in result.cautions)


def test_three_launches_are_counted_as_launches(tmp_path: Path) -> None:
    result = analyze_run(lockstep_folder(tmp_path, launches=3))
    assert result.interval is not None
    assert result.interval.pairs == 3
    assert result.lockstep is not None
    assert result.lockstep.paired is None
    assert result.speed == "faster"
    assert "over 3 launches" in report.FILES["report.md"](result).decode()  # type: ignore[union-attr]


def test_the_console_log_gives_the_same(tmp_path: Path) -> None:
    folder = lockstep_folder(tmp_path)
    exact = analyze_run(folder)
    log = folder / "launches" / "01-lockstep" / "stdout.log"
    rough = analyze_logs([log], [log], warmup=1)
    assert exact.speedup is not None
    assert rough.speedup is not None
    assert rough.mode == "lockstep"
    assert rough.speedup.total == pytest.approx(exact.speedup.total, rel=1e-5)
    assert [gate.name for gate in rough.parity.gates] == [gate.name for gate in exact.parity.gates]  # type: ignore[union-attr]


def test_a_lockstep_log_is_compared_with_nothing_but_itself(tmp_path: Path) -> None:
    folder = lockstep_folder(tmp_path, launches=2)
    logs = [folder / "launches" / f"0{number}-lockstep" / "stdout.log" for number in (1, 2)]
    alone = write(tmp_path / "alone.log", [records.console_header(header(iterations=1)),
                                           records.console_line(record(1), 1)])  # fmt: skip
    for baseline, dcp in ((logs[0], logs[1]), (alone, logs[0]), (logs[0], alone)):
        with pytest.raises(UsageError, match="holds both cases"):
            analyze_logs([baseline], [dcp])
    assert analyze_logs(logs, logs, warmup=1).verdict.exit_code == ExitCode.PASSED


@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({("dcp", 7): {"loss": None}}, ExitCode.RECORDS, "non_finite"),
        ({("dcp", 7): {"gradient_difference": float("nan")}}, ExitCode.RECORDS, "non_finite"),
        ({("baseline", 7): {"batch_digest": "f" * 16}}, ExitCode.RECORDS, "misaligned"),
        ({("baseline", 7): {"case": "dcp"}}, ExitCode.RECORDS, "duplicate"),
        ({("baseline", 7): {"case": None}}, ExitCode.RECORDS, "malformed"),
    ],
)
def test_records_that_cannot_be_compared(tmp_path: Path, change: Any, code: ExitCode, kind: str) -> None:
    result = analyze_run(lockstep_folder(tmp_path, change=change))
    assert result.verdict.exit_code == code
    assert kind in {fault.kind for fault in result.faults}
    assert result.speedup is None


def test_a_launch_that_failed_fails_the_run(tmp_path: Path) -> None:
    result = analyze_run(lockstep_folder(tmp_path, status="failed"))
    assert result.verdict.exit_code == ExitCode.LAUNCH_FAILED
    assert "ran out of memory" in result.verdict.reasons[0]


def test_a_loss_that_is_off_in_one_iteration_is_placed(tmp_path: Path) -> None:
    result = analyze_run(lockstep_folder(tmp_path, change={("dcp", 7): {"loss": 5.0 / 7 * 1.002}}, dtype="bfloat16"))
    assert result.verdict.exit_code == ExitCode.GATE_FAILED
    text = report.FILES["report.md"](result)
    assert text is not None
    assert "first at iteration 7 of launch 1, 1 of 30 beyond" in text.decode()
    assert 'name="loss parity S1' in ci.junit(result)
    assert "loss parity failed at gate S1" in ci.junit(result) or "usually a wrong scale" in ci.junit(result)


@pytest.mark.parametrize("broken", [False, True])
def test_statistics_name_the_mode_and_a_reason_for_every_null(tmp_path: Path, broken: bool) -> None:
    change = {("dcp", 4): {"loss": None}} if broken else None
    document = statistics_json.document(analyze_run(lockstep_folder(tmp_path, change=change)))
    json.dumps(document, allow_nan=False)
    assert document["mode"] == "lockstep"
    assert (document["lockstep"] is None) == broken
    absent = {path for path in nulls(document) if not path.startswith("faults.")}
    assert absent == set(document["reasons"])


def test_all_reports_are_written_twice_with_the_same_bytes(tmp_path: Path) -> None:
    folder = lockstep_folder(tmp_path / "run")
    report.write(analyze_run(folder), folder / "analysis")
    before = {path.name: path.read_bytes() for path in (folder / "analysis").iterdir()}
    report.write(analyze_run(folder), folder / "analysis")
    assert before == {path.name: path.read_bytes() for path in (folder / "analysis").iterdir()}
    assert b"Lockstep" in before["report.html"]
    assert b"in lockstep, over 29 iterations" in before["report.md"]
    assert b"mode,lockstep" in before["summary.csv"]


def test_history_and_manifest_facts_know_the_mode(tmp_path: Path) -> None:
    folder = lockstep_folder(tmp_path / "run", launches=2)
    (found,) = history.runs(tmp_path)
    assert (found.mode, found.pairs) == ("lockstep", 2)
    facts = launched.launches(RunFolder(folder))
    assert [(fact.id, fact.case, fact.pair) for fact in facts] == [("01-lockstep", "lockstep", 1),
                                                                  ("02-lockstep", "lockstep", 2)]  # fmt: skip
    worker = facts[0].worker
    assert worker is not None
    assert "scheduler" not in worker
    assert {case: own["scheduler"] for case, own in worker["cases"].items()} == {
        "baseline": "dp_balanced", "dcp": "default_dynamic_cp",
    }  # fmt: skip


def test_runs_of_different_modes_are_compared_only_where_that_is_allowed(tmp_path: Path) -> None:
    together = lockstep_folder(tmp_path / "a")
    apart = run_folder(
        tmp_path / "b",
        {name: [1.0] * ITERATIONS for name in ("01-baseline", "01-dcp")},
        spec(iterations=ITERATIONS),
    )
    with pytest.raises(UsageError, match="--allow mode"):
        compare(apart, together)
    found = compare(apart, together, allow=("mode",))
    assert any("mode launches, the second in mode lockstep" in note for note in found.notes)
    again = compare(together, lockstep_folder(tmp_path / "c"))
    assert again.exit_code == ExitCode.PASSED


def test_a_second_header_of_the_same_case_is_another_launch(tmp_path: Path) -> None:
    path = lockstep_folder(tmp_path) / "launches" / "01-lockstep" / "records.jsonl"
    lines = path.read_text().splitlines()
    write(path, [*lines[:2], lines[0], *lines[2:]])
    assert [bad.message for bad in parse_log(path).malformed] == [
        "a second header; the file holds more than one launch"
    ]
    assert records.read(path).malformed
