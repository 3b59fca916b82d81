"""Lockstep on real gloo ranks, in float32: both cases at the same weights, what it finds and what it must not find."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpbench import plan, records, report
from dcpbench.analysis.pipeline import Analysis, analyze_logs, analyze_run
from dcpbench.data.prepare import prepare
from dcpbench.records import LaunchRecords
from dcpbench.runfolder import layout as runfolder
from dcpbench.runfolder import ledger
from dcpbench.spec import Spec

LAUNCHER = Path(__file__).with_name("lockstep_launches.py")
RANKS = 2
ITERATIONS = 12
SAME = {"cases": {"dcp": {"scheduler": "dp_balanced"}}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sound": ("none", {}),
    "sharded": ("none", {"training": {"optimizer_sharding": True}}),
    "same": ("none", SAME),
    "scale": ("scale", {}),
    "gradient": ("gradient", {}),
    "launches": ("none", {"mode": "launches"}),
}
"""Run -> fault and what its spec has besides."""


def a_spec(changes: dict[str, Any]) -> Spec:
    parts: dict[str, Any] = {
        "name": "tiny",
        "mode": "lockstep",
        "model": {"layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 97},
        "topology": {"device": "cpu", "gpus_per_node": RANKS, "cp": RANKS},
        "training": {"iterations": ITERATIONS, "warmup_iterations": 2, "global_batch_size": 5, "dtype": "float32",
                     "lr": 0.01, "clip_grad": 0.5},
        "data": {"kind": "list", "lengths": [150, 40, 17, 90, 200, 33, 160], "tokens": "zipf"},
        "cases": {"max_seqlen_per_dp_cp_rank": 120},
        "launches": {"pairs": 1},
        # Ranks share cores with others, so times jump: what is tested is the machinery, not the machine.
        "decision": {"margin": 0.9},
    }  # fmt: skip
    for name, change in changes.items():
        parts[name] = {**parts[name], **change} if isinstance(change, dict) else change
    return Spec.model_validate(parts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run -> its folder; all of them were made by one torchrun."""
    root = tmp_path_factory.mktemp("lockstep")
    arguments, folders = [], {}
    for name, (fault, changes) in RUNS.items():
        spec, folder = a_spec(changes), root / name
        launches = plan.build(spec, folder)
        if name == "sound" and (control := plan.lockstep_control(launches)) is not None:
            launches.append(control)
        runfolder.describe(runfolder.RunFolder(folder), spec, launches)
        prepare(spec, folder / "data")
        for launch in launches:
            launch.folder.mkdir(parents=True)
            launch.file.write_text(launch.model_dump_json())
            arguments.append(f"{fault}={launch.file}")
            ledger.append(folder / "ledger.jsonl", "start", launch.id)
            ledger.append(folder / "ledger.jsonl", "end", launch.id, status="completed", exit_code=0, reason=None)
        folders[name] = folder
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(LAUNCHER), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[:3000]
    (root / "console.log").write_text(done.stdout)
    return folders


@pytest.fixture(scope="module")
def analysed(runs: dict[str, Path]) -> dict[str, Analysis]:
    return {name: analyze_run(folder) for name, folder in runs.items()}


def of_case(found: LaunchRecords, case: str, name: str) -> np.ndarray:
    return np.array([getattr(record, name) for record in found.iterations if record.case == case])


def records_of(runs: dict[str, Path], run: str) -> LaunchRecords:
    return records.read(runs[run] / "launches" / "01-lockstep" / "records.jsonl")


@pytest.mark.parametrize("run", ["sound", "sharded"])
def test_both_cases_are_computed_in_every_iteration_in_alternating_order(runs: dict[str, Path], run: str) -> None:
    found = records_of(runs, run)
    assert not found.malformed
    assert [(header.case, header.mode) for header in found.headers] == [("baseline", "lockstep"), ("dcp", "lockstep")]
    assert found.end is not None
    for case, first in (("baseline", 1), ("dcp", 2)):
        assert of_case(found, case, "iteration").tolist() == list(range(1, ITERATIONS + 1))
        assert of_case(found, case, "order").tolist() == [first, 3 - first] * (ITERATIONS // 2)
    sizes = [record.cp_sizes for record in found.iterations]
    assert all(set(found) == {2} for found in sizes[::2])
    assert any(1 in found for found in sizes[1::2])


@pytest.mark.parametrize("run", ["sound", "sharded"])
def test_cases_agree_at_equal_weights_to_float32(runs: dict[str, Path], run: str) -> None:
    found = records_of(runs, run)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(of_case(found, "dcp", name), of_case(found, "baseline", name), rtol=1e-6)
    assert (of_case(found, "dcp", "gradient_difference") < 1e-5).all()
    # Equal to the last bit they cannot be: they add up in another order. Then nothing would have been compared.
    assert (of_case(found, "dcp", "gradient_difference") > 0).any()
    sketches = [of_case(found, case, "gradient_sketch") for case in ("baseline", "dcp")]
    assert sketches[0].shape == (ITERATIONS, 64)
    scale = np.abs(sketches[0]).max()
    np.testing.assert_allclose(sketches[1], sketches[0], atol=1e-5 * scale)


@pytest.mark.parametrize("run", ["sound", "sharded", "same", "scale", "gradient"])
def test_updates_are_those_of_a_launch_of_the_baseline_whatever_dcp_computes(runs: dict[str, Path], run: str) -> None:
    alone = records.read(runs["launches"] / "launches" / "01-baseline" / "records.jsonl")
    expected = np.array([[record.loss, record.grad_norm] for record in alone.iterations])
    found = records_of(runs, run)
    got = np.stack([of_case(found, "baseline", "loss"), of_case(found, "baseline", "grad_norm")], axis=1)
    assert expected[-1, 0] < expected[0, 0]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_a_case_s_time_is_its_pass_and_the_shared_update(runs: dict[str, Path]) -> None:
    for record in records_of(runs, "sound").iterations:
        assert record.seconds is not None
        assert record.pass_seconds is not None
        assert record.update_seconds is not None
        assert record.pass_seconds > 0
        assert record.update_seconds > 0
        assert max(record.rank_seconds) == record.seconds <= record.pass_seconds + record.update_seconds + 1e-9
        assert record.seconds >= record.pass_seconds
    updates = [of_case(records_of(runs, "sound"), case, "update_seconds") for case in ("baseline", "dcp")]
    assert updates[0].tolist() == updates[1].tolist()


def test_a_sound_run_passes_every_gate(analysed: dict[str, Analysis]) -> None:
    for run in ("sound", "sharded"):
        result = analysed[run]
        assert result.parity is not None
        assert result.parity.passed
        assert [gate.name for gate in result.parity.gates] == ["S1", "S2", "L4", "S3", "S4", "S5"]
        assert result.verdict.exit_code == 0
        assert result.mode == "lockstep"
        assert result.lockstep is not None
        assert not result.lockstep.same_case
        assert result.lockstep.paired is not None
        assert result.lockstep.paired.iterations == ITERATIONS - 2
        assert [launch.id for launch in result.launches] == ["01-lockstep-baseline", "01-lockstep-dcp"]


def test_a_scale_of_a_thousandth_in_one_case_fails_from_the_first_iteration_on(analysed: dict[str, Analysis]) -> None:
    result = analysed["scale"]
    assert result.parity is not None
    assert result.verdict.exit_code == 1
    failed = {gate.name: gate for gate in result.parity.failed}
    assert {"S1", "S2", "S3", "S4", "S5"} <= set(failed)
    assert failed["S1"].where.startswith("first at iteration 1 of launch 1, 12 of 12")
    assert failed["S5"].statistic == pytest.approx(1e-3, rel=0.3)
    assert "S1" in result.verdict.reasons[0]


def test_a_gradient_that_no_loss_shows_is_found_and_placed(analysed: dict[str, Analysis]) -> None:
    parity = analysed["gradient"].parity
    assert parity is not None
    failed = {gate.name: gate for gate in parity.failed}
    assert "S1" not in failed
    assert {"S3", "S5"} <= set(failed)
    assert failed["S5"].where.endswith("most in output")


def test_a_case_compared_with_itself_agrees_and_says_what_it_is(analysed: dict[str, Analysis]) -> None:
    result = analysed["same"]
    assert result.parity is not None
    assert result.parity.passed
    assert result.speed in ("equivalent", "inconclusive")
    assert result.lockstep is not None
    assert result.lockstep.same_case
    assert result.order_effect is not None
    text = (report.FILES["report.md"](result) or b"").decode()
    assert "A/A" in text
    assert "the same case (A/A)" in text


def test_the_control_computes_the_baseline_twice_and_is_no_part_of_the_comparison(
    runs: dict[str, Path], analysed: dict[str, Analysis]
) -> None:
    found = records.read(runs["sound"] / "launches" / plan.LOCKSTEP_CONTROL / "records.jsonl")
    assert not found.malformed
    assert [(header.case, header.scheduler) for header in found.headers] == [
        ("baseline", "dp_balanced"), ("dcp", "dp_balanced"),
    ]  # fmt: skip
    own = records_of(runs, "sound")
    for name in ("loss", "batch_digest", "order"):
        assert of_case(found, "baseline", name).tolist() == of_case(own, "baseline", name).tolist(), name
    # The same computation on the CPU at the same weights, whichever place it is in.
    for name in ("loss", "grad_norm", "batch_digest", "cp_sizes"):
        assert of_case(found, "dcp", name).tolist() == of_case(found, "baseline", name).tolist(), name
    control = analysed["sound"].lockstep_control
    assert control is not None
    assert (control.id, control.scheduler) == (plan.LOCKSTEP_CONTROL, "dp_balanced")
    assert (control.iterations, control.records) == (ITERATIONS - 2, 2 * ITERATIONS)
    assert control.interval is not None
    assert control.interval.low <= control.speedup <= control.interval.high
    assert control.order_effect is not None
    assert (control.loss_difference_max, control.grad_norm_difference_max, control.gradient_difference_max) == (0, 0, 0)
    assert control.memory_difference is None
    assert [launch.id for launch in analysed["sound"].launches] == ["01-lockstep-baseline", "01-lockstep-dcp"]
    parity = analysed["sound"].parity
    assert parity is not None
    assert {gate.floor for gate in parity.gates if gate.name != "L4"} == {0.0}
    assert analysed["sharded"].lockstep_control is None
    text = (report.FILES["report.md"](analysed["sound"]) or b"").decode()
    assert f"A/A: {control.speedup:.3f} (" in text


def test_analysis_can_be_repeated_with_the_same_bytes(runs: dict[str, Path], analysed: dict[str, Analysis]) -> None:
    names = ("statistics.json", "report.md", "summary.csv", "aligned.parquet", "report.html")
    again = analyze_run(runs["sound"])
    for name in names:
        assert report.FILES[name](again) == report.FILES[name](analysed["sound"]), name


def test_the_console_log_alone_holds_both_cases(runs: dict[str, Path], analysed: dict[str, Analysis]) -> None:
    text = (runs["sound"].parent / "console.log").read_text()
    whole = text[text.index("dcpbench header") : text.index("dcpbench end")]
    log = runs["sound"].parent / "sound.log"
    log.write_text(whole + "dcpbench end | 12 iterations in 1.0 s |\n")
    result = analyze_logs([log], [log])
    assert result.mode == "lockstep"
    assert result.speedup is not None
    assert analysed["sound"].speedup is not None
    assert result.speedup.total == pytest.approx(analysed["sound"].speedup.total, rel=1e-4)
    assert result.parity is not None
    assert result.parity.passed
