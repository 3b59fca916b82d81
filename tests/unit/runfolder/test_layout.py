"""Which folders a run may use, and what it writes there first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcpbench.errors import LogError, SpecError, UsageError
from dcpbench.plan import build
from dcpbench.runfolder.layout import default_path, describe, existing, open_for, write_text
from dcpbench.spec import Spec


def spec(**changes: object) -> Spec:
    return Spec.model_validate({"name": "x", "launches": {"pairs": 1}, **changes})


def begun(path: Path, made: Spec) -> Path:
    describe(open_for(made, path, resume=False), made, build(made, path))
    return path


def test_new_folder(tmp_path: Path) -> None:
    path = begun(tmp_path / "runs" / "a", spec())
    plan = json.loads((path / "plan.json").read_text())
    assert [launch["id"] for launch in plan["launches"]] == ["01-baseline", "01-dcp"]
    assert "torch.distributed.run" in plan["launches"][0]["argv"]
    assert sorted(entry.name for entry in path.iterdir()) == ["plan.json", "spec.yaml"]


def test_attempt_that_ended_before_its_first_launch_is_begun_again(tmp_path: Path) -> None:
    path = begun(tmp_path / "a", spec())
    (path / "data").mkdir()
    open_for(spec(topology={"cp": 2}), path, resume=False)


def test_a49_run_is_never_written_over(tmp_path: Path) -> None:
    path = begun(tmp_path / "a", spec())
    (path / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="--resume"):
        open_for(spec(), path, resume=False)


def test_folder_with_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match=r"thesis\.tex.*--out"):
        open_for(spec(), tmp_path, resume=False)


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        open_for(spec(), tmp_path / "a", resume=False)


def test_resume_with_the_same_spec(tmp_path: Path) -> None:
    made = spec(data={"kind": "csv", "path": str(Path.home() / "lengths.csv")})
    path = begun(tmp_path / "a", made)
    open_for(made, path, resume=True)


def test_resume_may_change_how_launches_are_watched(tmp_path: Path) -> None:
    path = begun(tmp_path / "a", spec())
    other = spec(launches={"pairs": 1, "timeout": 5.0, "keep_going": True, "grace": 1.0}, output={"dir": str(path)})
    open_for(other, path, resume=True)


def test_resume_refuses_another_spec_and_names_the_fields(tmp_path: Path) -> None:
    path = begun(tmp_path / "a", spec())
    with pytest.raises(SpecError, match=r"topology\.cp, training\.lr"):
        open_for(spec(topology={"cp": 2}, training={"lr": 1.0}), path, resume=True)
    with pytest.raises(SpecError, match=r"data\.lengths"):
        open_for(spec(data={"kind": "list", "lengths": [5]}), path, resume=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        open_for(spec(), tmp_path / "none", resume=True)


def test_existing(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no folder"):
        existing(tmp_path / "none")
    with pytest.raises(LogError, match=r"spec\.yaml"):
        existing(tmp_path)
    assert existing(begun(tmp_path / "a", spec())).ledger == tmp_path / "a" / "ledger.jsonl"


def test_default_path(tmp_path: Path) -> None:
    assert default_path(spec(output={"dir": str(tmp_path)})) == tmp_path
    assert default_path(spec()).parts[:1] == ("runs",)
    assert default_path(spec()).name.startswith("x-2")


def test_secrets_stay_out_of_what_is_written(tmp_path: Path) -> None:
    planted = "hf_" + "Qz4" * 12
    path = begun(tmp_path / "a", spec(data={"kind": "csv", "path": f"https://joe:{planted}@host/lengths.csv"}))
    for file in path.iterdir():
        assert planted not in file.read_text()


def test_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "f", "torn \ud800")
    assert (tmp_path / "f").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
