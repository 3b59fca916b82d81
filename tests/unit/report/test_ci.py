from pathlib import Path
from xml.etree import ElementTree

import pytest
from log_lines import run_folder

from dcpbench import cli
from dcpbench.analysis.pipeline import Analysis, analyze_run
from dcpbench.report import ci, compared
from dcpbench.spec import Decision

TIMES = {"01-baseline": [1.0] * 6, "01-dcp": [0.5] * 6}


@pytest.fixture
def passed(tmp_path: Path) -> Analysis:
    return analyze_run(run_folder(tmp_path / "passed", TIMES))


@pytest.fixture
def failed(tmp_path: Path) -> Analysis:
    return analyze_run(run_folder(tmp_path / "failed", TIMES, changes={"01-dcp": {1: {"loss": 9.0}}}))


@pytest.fixture
def broken(tmp_path: Path) -> Analysis:
    return analyze_run(run_folder(tmp_path / "broken", TIMES, changes={"01-dcp": {3: {"loss": None}}}))


def test_junit_counts_what_failed(passed: Analysis, failed: Analysis, broken: Analysis) -> None:
    for analysis, failures in ((passed, []), (failed, ["L1", "L4"]), (broken, ["records"])):
        (suite,) = ElementTree.fromstring(ci.junit(analysis))
        cases = suite.findall("testcase")
        bad = [str(case.get("name")) for case in cases if case.find("failure") is not None]
        assert len(bad) == len(failures) == int(suite.get("failures") or -1)
        assert all(word in name for word, name in zip(failures, bad, strict=True))
        assert len(cases) == int(suite.get("tests") or -1)


def test_what_was_asked_of_the_speedup_is_a_test_case(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, TIMES)
    for decision, failures in ((Decision(min_speedup=1.5), "1"), (Decision(), "0")):
        (suite,) = ElementTree.fromstring(ci.junit(analyze_run(folder, decision=decision)))
        assert suite.get("failures") == failures


def test_annotations_of_github(passed: Analysis, failed: Analysis) -> None:
    lines = ci.github(failed).splitlines()
    assert sum(line.startswith("::error title=dcpbench: loss parity L1%3A first step%2C") for line in lines) == 1
    assert sum(line.startswith("::warning ") for line in lines) == len(failed.cautions)
    assert not [line for line in ci.github(passed).splitlines() if line.startswith("::error")]
    assert ci.github(passed).splitlines()[-1].startswith("::notice title=dcpbench example::PASSED: dcp trained 2.000")


def test_a_summary_for_a_pull_request(passed: Analysis, broken: Analysis) -> None:
    assert "| mean iteration (ms) | 1,000.0 | 500.0 |" in ci.summary(passed)
    assert "**FAILED: the records cannot be compared" in ci.summary(broken)
    assert "loss missing" in ci.summary(broken)


def test_formats_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {shown.value for shown in cli.Shown} == {"text", "markdown", "html", "csv", "json", *ci.FORMATS}
    assert {shown.value for shown in cli.Compared} == {"text", *compared.FORMATS}
    folder = run_folder(tmp_path, TIMES)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(folder), "--format", "junit"])
    assert stopped.value.code == 0
    ElementTree.fromstring(capsys.readouterr().out)
