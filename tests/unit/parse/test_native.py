import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_lines import header, jsonl, record, write

from dcpbench import records
from dcpbench.parse import detect, parse_log
from dcpbench.records import IterationRecord, RunEnd
from dcpbench.table import ABSENT, FLOATS, INTEGERS, TEXTS

COUNT = st.none() | st.integers(0, 10**18 - 1)
TIME = st.none() | st.floats(1e-6, 1e6)
NUMBER = st.none() | st.floats(allow_nan=True, allow_infinity=True)

RECORDS = st.builds(
    IterationRecord,
    iteration=st.integers(1, 10**9),
    consumed_samples=COUNT,
    consumed_tokens=COUNT,
    samples=COUNT,
    tokens=COUNT,
    padding_tokens=COUNT,
    squared_lengths=COUNT,
    longest=COUNT,
    token_count=COUNT,
    microbatches=COUNT,
    loss=NUMBER,
    grad_norm=NUMBER,
    learning_rate=st.none() | st.floats(0, 1),
    seconds=TIME,
    scheduling_seconds=TIME,
    cp_sizes=st.dictionaries(st.integers(1, 4096), st.integers(1, 10**6), max_size=4),
    batch_digest=st.none() | st.text("0123456789abcdef", min_size=1, max_size=64),
    peak_memory_bytes=st.none() | st.integers(0, 2**48),
    tflops_per_gpu=st.none() | st.floats(1e-6, 1e6),
    skipped=st.booleans(),
)
ABSOLUTE = {"seconds": 5.1e-7, "scheduling_seconds": 5.1e-7, "peak_memory_bytes": 2**20 * 0.0501}
RELATIVE = {"loss": 5e-9, "grad_norm": 5e-6, "learning_rate": 5e-6, "tflops_per_gpu": 5e-4}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=6))
def test_console_lines_read_back(tmp_path: Path, rows: list[IterationRecord]) -> None:
    """Whatever a worker prints comes back: counts and words exactly, the rest at the precision of the line."""
    path = write(tmp_path / "log.log", [records.console_line(row, 10**9) for row in rows])
    table = parse_log(path)
    assert table.format == "native"
    assert table.malformed == ()
    assert table.rows == len(rows)
    problems = table.problems or {}
    for index, row in enumerate(rows):
        assert table.columns["total"][index] == 10**9
        assert table.columns["line"][index] == index + 1
        for name in set(INTEGERS) - {"line", "total", "skipped", "skipped_samples"}:
            value = getattr(row, name)
            assert table.columns[name][index] == (ABSENT if value is None else value), name
        assert table.columns["skipped"][index] == row.skipped
        assert table.columns["batch_digest"][index] == (row.batch_digest or "").encode()
        assert table.columns["cp_sizes"][index] == records.cp_text(row.cp_sizes).encode()
        for name in set(FLOATS) - {"loss_sum", "imbalance"}:
            value, found = getattr(row, name), table.columns[name][index]
            if value is None or math.isnan(value):
                assert np.isnan(found), name
            else:
                close = pytest.approx(value, rel=RELATIVE.get(name, 0), abs=ABSOLUTE.get(name, 0))
                assert found == close or found == float(f"{value:.9g}"), name
        not_finite = {n for n in ("loss", "grad_norm") if (v := getattr(row, n)) is not None and not math.isfinite(v)}
        assert len(problems.get(index, ())) == len(not_finite)


def test_a_whole_log_with_header_and_end(tmp_path: Path) -> None:
    head = header(versions={"torch": "2.11", "note": "a | b: c \u00e9"})
    lines = [
        "W0609 12345 torch/distributed/run.py:774] ****",
        "[default0]:" + records.console_header(head) + "glued after",
        *("[default0]:" + records.console_line(record(i, 0.5), 6) for i in range(1, 7)),
        "[default0]:" + records.console_end(RunEnd(iterations=6, seconds=12.3)),
    ]
    table = parse_log(write(tmp_path / "stdout.log", lines))
    assert table.header == head
    assert table.end == RunEnd(iterations=6, seconds=12.3)
    assert table.ends_are_marked
    assert table.rows == 6
    assert table.malformed == ()


def test_a_torn_header_and_a_second_one(tmp_path: Path) -> None:
    text = records.console_header(header())
    torn = parse_log(write(tmp_path / "torn.log", [text[:-20], records.console_line(record(1), 6)]))
    assert torn.header is None
    assert [(bad.line, bad.message) for bad in torn.malformed] == [(1, "the launch header is torn")]
    twice = parse_log(write(tmp_path / "twice.log", [text, text]))
    assert twice.header is not None
    assert twice.malformed[0].line == 2


@pytest.mark.parametrize("at", range(28, 250, 17))
def test_a51_a_record_interrupted_by_another_line(tmp_path: Path, at: int) -> None:
    lines = [records.console_line(record(i), 3) for i in (1, 2, 3)]
    lines[1:2] = [lines[1][:at] + "Traceback", lines[1][at:]]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert table.columns["iteration"].tolist() == [1, 3]
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(2, 2)]


def test_the_end_of_a_record_whose_beginning_is_lost(tmp_path: Path) -> None:
    lines = [records.console_line(record(i), 3) for i in (1, 2, 3)]
    lines[1] = lines[1][40:]
    table = parse_log(write(tmp_path / "log.log", lines))
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(2, None)]


def test_records_jsonl_is_recognised_and_exact(tmp_path: Path) -> None:
    rows = [record(i, 0.1 + 1e-12 * i, loss=1 / 3 + i) for i in range(1, 7)]
    table = parse_log(jsonl(tmp_path / "records.jsonl", rows, header()))
    assert table.format == "jsonl"
    assert table.header == header()
    assert table.end is not None
    assert table.columns["seconds"].tolist() == [row.seconds for row in rows]
    assert table.columns["loss"].tolist() == [row.loss for row in rows]
    assert table.columns["cp_sizes"].tolist() == [b"1x2,4x1"] * 6


def test_torn_lines_of_records_jsonl_are_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "records.jsonl", [record(i) for i in range(1, 4)], header())
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:60]
    lines.insert(4, b'{"kind":"iteration","schema_version":1,"iteration":"x"}')
    path.write_bytes(b"\n".join(lines))
    table = parse_log(path)
    assert table.columns["iteration"].tolist() == [1, 3]
    assert [(bad.line, bad.iteration) for bad in table.malformed] == [(3, 2), (5, None)]


def test_detection_asks_the_most_specific_first(tmp_path: Path) -> None:
    assert detect(write(tmp_path / "a.log", [records.console_line(record(1), 3)])) == "native"
    assert detect(write(tmp_path / "b.log", [records.console_header(header())])) == "native"
    assert detect(write(tmp_path / "c.log", ["nothing here"])) is None
    assert set(TEXTS) == {"batch_digest", "cp_sizes", "case", "gradient_segment"}
