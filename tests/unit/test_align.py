from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_lines import header, jsonl, megatron, megatron_log, record, write

from dcpbench.align import MOST_ITERATIONS, Aligned, align
from dcpbench.errors import LogError
from dcpbench.faults import LISTED, Fault, LaunchInput
from dcpbench.parse import parse_log
from dcpbench.records import IterationRecord


def launch(path: Path, case: str = "baseline", pair: int = 1, **values: Any) -> LaunchInput:
    return LaunchInput(f"{pair:02d}-{case}", case, pair, None, parse_log(path), **values)  # type: ignore[arg-type]


def both(tmp_path: Path, baseline: Sequence[str], dcp: Sequence[str]) -> list[LaunchInput]:
    """Two launches from lines of console log."""
    return [
        launch(write(tmp_path / "baseline.log", baseline), "baseline"),
        launch(write(tmp_path / "dcp.log", dcp), "dcp"),
    ]


def ours(tmp_path: Path, baseline: Sequence[IterationRecord], dcp: Sequence[IterationRecord]) -> list[LaunchInput]:
    """Two launches from records."""
    return [
        launch(jsonl(tmp_path / f"{case}.jsonl", rows, header(case)), case)
        for case, rows in (("baseline", baseline), ("dcp", dcp))
    ]


def found(launches: Sequence[LaunchInput], **options: Any) -> list[tuple[str, int | None, str, str]]:
    aligned, faults = align(launches, **options)
    assert (aligned is None) == bool(faults)
    assert all(fault.launch == f"01-{fault.case}" for fault in faults)
    return [(fault.case, fault.iteration, fault.kind, fault.message) for fault in faults]


GOOD = [megatron(i) for i in range(1, 7)]


def test_whole_logs_align(tmp_path: Path) -> None:
    paths = [megatron_log(tmp_path / f"{n}.log", [1000.0 + n] * 6) for n in range(2)]
    aligned, faults = align([launch(paths[0]), launch(paths[1], "dcp")])
    assert faults == ()
    assert isinstance(aligned, Aligned)
    assert aligned.iterations == 6
    assert aligned.keys == ("consumed_samples", "samples")
    assert aligned.columns["consumed_samples"].tolist() == [[32, 64, 96, 128, 160, 192]] * 2
    seconds = aligned.of_case("dcp", "seconds", 2)
    assert seconds is not None
    assert seconds.tolist() == [[1.001] * 4]
    assert aligned.of_case("dcp", "tokens") is None


def test_a46_malformed_number_fails_at_its_line(tmp_path: Path) -> None:
    bad = [*GOOD[:5], megatron(6, loss="1.08.3")]
    assert found(both(tmp_path, GOOD, bad)) == [
        ("dcp", 6, "malformed", "dcp.log, line 6: lm loss '1.08.3' is not a number")
    ]


def test_a47_nan_loss_has_no_field(tmp_path: Path) -> None:
    good = [megatron(i, 10) for i in range(1, 11)]
    bad = [*good[:5], megatron(6, 10, loss=None, norm="nan"), *good[6:]]
    assert found(both(tmp_path, good, bad)) == [("dcp", 6, "non_finite", "loss missing; grad norm is nan")]


def test_a49_two_runs_in_one_file(tmp_path: Path) -> None:
    faults = found(both(tmp_path, GOOD[:3] + GOOD, GOOD))
    assert faults == [
        ("baseline", 1, "duplicate", "recorded 2 times (lines 1, 4)"),
        ("baseline", 2, "duplicate", "recorded 2 times (lines 2, 5)"),
        ("baseline", 3, "duplicate", "recorded 2 times (lines 3, 6)"),
    ]


def test_a50_a_mid_run_record_taken_for_the_end(tmp_path: Path) -> None:
    assert found(both(tmp_path, GOOD, GOOD[:4])) == [
        ("dcp", 5, "missing", "no record of this iteration: 4 of 6"),
        ("dcp", 6, "missing", "no record of this iteration: 4 of 6"),
    ]
    # The same when both logs end too early: what they announce counts, not what they agree on.
    assert len(found(both(tmp_path, GOOD[:4], GOOD[:4]))) == 4


def test_a50_a_log_with_no_record_at_all(tmp_path: Path) -> None:
    for baseline, dcp in (([], []), (GOOD, []), (["step 1"], GOOD)):
        faults = found(both(tmp_path, baseline, dcp))
        assert faults
        assert {kind for _, _, kind, _ in faults} == {"missing"}
        assert all("no records" in message for _, _, _, message in faults)


def test_a51_an_interrupted_record_is_one_fault(tmp_path: Path) -> None:
    torn = [*GOOD[:2], GOOD[2][:150], GOOD[2][150:], *GOOD[3:]]
    assert found(both(tmp_path, torn, GOOD)) == [
        ("baseline", 3, "malformed", "baseline.log, line 3: the record is interrupted before its end")
    ]


def test_skipped_steps(tmp_path: Path) -> None:
    bad = [*GOOD[:3], megatron(4, loss="0.000000E+00", norm="nan", skipped=1, nan=1), *GOOD[4:]]
    assert found(both(tmp_path, GOOD, bad)) == [("dcp", 4, "skipped", "the optimizer step was skipped")]
    extra = [line.replace(" elapsed", " skipped samples:           32 | elapsed") for line in GOOD[:1]] + GOOD[1:]
    assert found(both(tmp_path, GOOD, extra)) == [("dcp", 1, "skipped", "32 samples had been skipped")]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"loss": float("nan")}, "non_finite", "loss is nan"),
        ({"loss": float("inf")}, "non_finite", "loss is inf"),
        ({"loss": None}, "non_finite", "loss missing"),
        ({"grad_norm": float("inf")}, "non_finite", "grad_norm is inf"),
        ({"seconds": float("nan")}, "non_finite", "seconds is nan"),
        ({"seconds": None}, "non_finite", "iteration time missing"),
        ({"seconds": 0.0}, "non_finite", "iteration time is 0.0 s"),
        ({"seconds": -1.0}, "non_finite", "iteration time is -1.0 s"),
        ({"skipped": True, "loss": 0.0}, "skipped", "the optimizer step was skipped"),
        ({"consumed_samples": 33}, "misaligned", "consumed samples rose by 9; the batch has 8 samples"),
        ({"batch_digest": "beef"}, "misaligned", "batch digest beef where 01-baseline has 0000000000000004"),
        ({"batch_digest": None}, "misaligned", "batch digest missing where 01-baseline has 0000000000000004"),
        ({"token_count": 991}, "misaligned", "loss tokens 991 where 01-baseline has 992"),
        ({"squared_lengths": 1}, "misaligned", "squared lengths 1 where 01-baseline has 200000"),
    ],
)
def test_what_is_wrong_with_one_record(tmp_path: Path, change: dict[str, Any], kind: str, words: str) -> None:
    good = [record(i) for i in range(1, 7)]
    bad = [
        record(i, **(change if i == 4 else {})) if "seconds" not in change or i != 4 else _timed(change)
        for i in range(1, 7)
    ]
    faults = [fault for fault in found(ours(tmp_path, good, bad)) if fault[1] == 4]
    assert ("dcp", 4, kind, words) in faults


def _timed(change: dict[str, Any]) -> IterationRecord:
    from dataclasses import replace

    return replace(record(4), **change)


def test_absent_grad_norms_are_no_fault(tmp_path: Path) -> None:
    rows = [record(i, grad_norm=None) for i in range(1, 7)]
    assert found(ours(tmp_path, rows, rows)) == []


def test_a_dropped_sample_shows_in_every_later_iteration(tmp_path: Path) -> None:
    dcp = [megatron(i, consumed=i * 32 - (i >= 3)) for i in range(1, 7)]
    faults = found(both(tmp_path, GOOD, dcp))
    assert ("dcp", 3, "misaligned", "consumed samples rose by 31; the batch has 32 samples") in faults
    assert [f[1] for f in faults if "where" in f[3]] == [3, 4, 5, 6]


def test_a_batch_size_that_was_not_asked_for(tmp_path: Path) -> None:
    faults = found(both(tmp_path, GOOD, GOOD), global_batch_size=16)
    assert len(faults) == 12
    assert faults[0] == ("baseline", 1, "misaligned", "consumed samples rose by 32; the batch has 16 samples")


def test_out_of_order_and_unexpected_iterations(tmp_path: Path) -> None:
    order = [GOOD[0], GOOD[2], GOOD[1], *GOOD[3:]]
    assert found(both(tmp_path, GOOD, order)) == [("dcp", 2, "misaligned", "recorded after iteration 3")]
    faults = found(both(tmp_path, GOOD, GOOD), iterations=4)
    assert ("dcp", 5, "misaligned", "not expected: the launch has iterations 1 to 4") in faults
    assert ("dcp", None, "misaligned", "the launch announces 6 iterations; 4 are expected") in faults


def test_the_iterations_asked_for_count(tmp_path: Path) -> None:
    faults = found(both(tmp_path, GOOD, GOOD), iterations=8)
    assert [(case, i) for case, i, kind, _ in faults if kind == "missing"] == [
        ("baseline", 7), ("baseline", 8), ("dcp", 7), ("dcp", 8),
    ]  # fmt: skip


def test_header_and_end_of_our_own_records(tmp_path: Path) -> None:
    rows = [record(i) for i in range(1, 7)]
    whole = launch(jsonl(tmp_path / "a.jsonl", rows, header()))
    no_end = launch(jsonl(tmp_path / "b.jsonl", rows, header("dcp"), end=False), "dcp")
    assert found([whole, no_end]) == [("dcp", None, "missing", "b.jsonl has no end mark; the launch did not complete")]
    no_header = launch(jsonl(tmp_path / "c.jsonl", rows), "dcp")
    assert found([whole, no_header]) == [("dcp", None, "missing", "c.jsonl has no launch header")]


def test_a_failed_launch_is_named_once_and_not_for_what_it_did_not_reach(tmp_path: Path) -> None:
    good, bad = both(tmp_path, GOOD, GOOD[:3])
    failed = LaunchInput(
        bad.id, bad.case, bad.pair, None, bad.table, failure="failed after iteration 3 of 6: exit code 7"
    )
    assert found([good, failed]) == [("dcp", None, "launch_failed", "failed after iteration 3 of 6: exit code 7")]


def test_every_fault_of_every_launch_is_listed(tmp_path: Path) -> None:
    """Nothing stops at the first: five kinds in one go, ordered by launch and iteration."""
    dcp = [GOOD[0], GOOD[0], megatron(2, loss="nan"), GOOD[3][:99], megatron(5, skipped=1), megatron(6, consumed=7)]
    kinds = [(iteration, kind) for _, iteration, kind, _ in found(both(tmp_path, GOOD[:5], dcp))]
    assert kinds == [
        (6, "missing"),
        (1, "duplicate"),
        (2, "non_finite"),
        (3, "missing"),
        (4, "malformed"),
        (5, "skipped"),
        (6, "misaligned"),
    ]


def test_a_flood_of_faults_is_counted(tmp_path: Path) -> None:
    n = LISTED + 500
    good = [megatron(i, n) for i in range(1, n + 1)]
    aligned, faults = align(both(tmp_path, good, good[:1]))
    assert aligned is None
    assert len(faults) == LISTED + 1
    assert Fault("dcp", "01-dcp", None, "missing", "and 499 more missing iterations in this launch") in faults


def test_an_absurd_number_of_iterations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="check the log"):
        align(both(tmp_path, GOOD, [megatron(1, MOST_ITERATIONS + 1)]))


def test_launches_of_several_pairs_are_compared_with_the_first(tmp_path: Path) -> None:
    paths = [megatron_log(tmp_path / f"{n}.log", [1000.0] * 6, batch=32 if n < 3 else 16) for n in range(4)]
    launches = [launch(path, case, pair) for path, (pair, case) in zip(paths, _PAIRS, strict=True)]
    _, faults = align(launches)
    assert {fault.launch for fault in faults} == {"02-dcp"}


_PAIRS = [(1, "baseline"), (1, "dcp"), (2, "baseline"), (2, "dcp")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), max_size=14), st.integers(1, 8))
def test_only_one_record_of_each_iteration_in_order_aligns(tmp_path: Path, order: list[int], total: int) -> None:
    good = [megatron(i, total) for i in range(1, total + 1)]
    dcp = [megatron(i, total) for i in order]
    faults = found(both(tmp_path, good, dcp))
    assert (faults == []) == (order == list(range(1, total + 1)))
    named = {iteration for _, iteration, _, _ in faults}
    if order:
        wrong = {i for i in range(1, 9) if order.count(i) != (1 if i <= total else 0)}
        assert wrong <= named


def test_columns_are_in_the_order_of_iterations(tmp_path: Path) -> None:
    rows = [record(i, seconds=float(i)) for i in range(1, 7)]
    aligned, _ = align(ours(tmp_path, rows, rows))
    assert aligned is not None
    assert np.array_equal(aligned.columns["seconds"], [[1, 2, 3, 4, 5, 6]] * 2)
