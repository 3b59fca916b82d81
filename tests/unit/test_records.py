import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from log_lines import header, jsonl, record, write

from dcpbench import records
from dcpbench.records import IterationRecord, Malformed, RunEnd


def strict(line: str) -> dict[str, object]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    loaded = json.loads(line, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


def test_every_kind_of_record_reads_back() -> None:
    for one in (
        header(versions={"torch": "2.11"}, cp_sizes=(1, 2, 4)),
        record(3, 0.1),
        RunEnd(iterations=3, seconds=1.5),
    ):
        assert records.from_json(records.to_json(one)) == one


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a58_non_finite_numbers_become_null_with_a_reason(value: float) -> None:
    line = records.to_json(record(1, loss=value, grad_norm=value, rank_seconds=(1.0, value)))
    data = strict(line)
    assert data["loss"] is None
    assert data["grad_norm"] is None
    assert data["rank_seconds"] == []
    assert data["problems"] == [f"loss is {value}", f"grad_norm is {value}", f"rank_seconds is {value}"]
    back = records.from_json(line)
    assert isinstance(back, IterationRecord)
    assert back.problems == tuple(data["problems"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"iteration": "3"}, "iteration is not of type int"),
        ({"iteration": True}, "iteration is not of type int"),
        ({"tokens": 10**30}, "tokens is not of type int"),
        ({"loss": [1]}, "loss is not of type float"),
        ({"cp_sizes": {"x": 1}}, "cp_sizes is not of type dict"),
        ({"rank_seconds": 3}, "rank_seconds is not of type tuple"),
        ({"schema_version": 99}, "record schema version 99"),
        ({"kind": "other"}, "not a dcpbench record"),
    ],
)
def test_wrong_values_are_refused_by_name(change: dict[str, object], words: str) -> None:
    data = {**json.loads(records.to_json(record(3))), **change}
    with pytest.raises(ValueError, match=words):
        records.from_json(json.dumps(data))


@pytest.mark.parametrize("line", ["", "{", "[1]", '"x"', "NaN", '{"kind":"iteration"}', "[" * 100_000])
def test_lines_that_are_no_records(line: str) -> None:
    with pytest.raises(ValueError, match="record"):
        records.from_json(line)


def test_unknown_keys_of_a_newer_version_are_passed_over() -> None:
    data = {**json.loads(records.to_json(record(3))), "weather": "fine"}
    assert records.from_json(json.dumps(data)) == record(3)


def test_read_and_stream_agree_and_name_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "records.jsonl", [record(1), record(2)], header())
    path.write_text(path.read_text() + '\n{"kind":"iteration","iteration":3,"lo')
    found = records.read(path)
    assert found.header == header()
    assert found.iterations == (record(1), record(2))
    assert found.end == RunEnd(iterations=2, seconds=1.0)
    assert found.malformed == ("line 6: not a whole JSON record; the line is torn or from another writer",)
    assert next(one for _, one in records.stream(path) if isinstance(one, Malformed)).iteration == 3


def test_console_line_is_for_people_too() -> None:
    line = records.console_line(replace(record(3, 0.25), loss=5.25), 20)
    assert line.startswith("dcpbench iteration 3/20 | loss: 5.25 | time ms: 250.000 | tokens: 1000 | ")
    assert line.endswith(" | steps skipped: 0 |")


def test_two_launches_in_one_file(tmp_path: Path) -> None:
    one = records.to_json(header())
    assert "second header" in records.read(write(tmp_path / "r.jsonl", [one, one])).malformed[0]
