"""What the README, the documents and the packaging promise, checked against the program."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dcpbench
from dcpbench import cli, config, parse, plan, report
from dcpbench.dcp import cost_profiles
from dcpbench.dcp.workload import Domain, PaddingPolicy
from dcpbench.errors import ExitCode
from dcpbench.runfolder import layout as runfolder
from dcpbench.settings import resources

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNNERS = sorted(path for path in (ROOT / "runners").iterdir() if path.is_file())
PYTHONS = ("3.11", "3.12", "3.13")


def section(title: str) -> str:
    """The text of one section of the README."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert match, f"the README has no section {title!r}"
    return match[1]


def table(text: str) -> list[list[str]]:
    """Cells of every table row in a text, heads and rules left out."""
    rows = [line.strip("|\n") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    heads = {n - 1 for n, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
    return [row for n, row in enumerate(cells) if n not in heads and n - 1 not in heads]


def bare_environment() -> dict[str, str]:
    """This process's environment without what would change a spec."""
    return {name: value for name, value in os.environ.items() if name not in {*config.ENVIRONMENT, *config.SWITCHES}}


@pytest.fixture(scope="module")
def with_command(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose PATH begins with a `dcpbench` that runs this checkout, installed or not."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "dcpbench"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dcpbench "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environ = bare_environment()
    environ["PATH"] = os.pathsep.join([str(folder), environ.get("PATH", "")])
    environ["PYTHONPATH"] = str(ROOT)
    return environ


# What documents say of the command line


def mentioned() -> list[tuple[str, str]]:
    found = []
    for path in [*DOCUMENTS, *RUNNERS, *resources.configs()]:
        text = path.read_text(encoding="utf-8")
        commands = re.findall(
            r"(?<![\w/.-])dcpbench ((?:run|analyze|check|manifest|report|plan|calibrate|compare|list)\b[^`#|\n\"]*)",
            text,
        )
        found += [(path.name, command.strip()) for command in commands]
    return found


def test_documents_mention_every_command() -> None:
    commands = {command.split()[0] for _, command in mentioned()}
    assert commands == set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("document", "command"), mentioned())
def test_commands_and_options_of_documents_exist(document: str, command: str) -> None:
    words = command.replace("[", " ").replace("]", " ").split()
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert words[0] in known, f"{document}: {command}"
    options = {option for parameter in known[words[0]].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options, f"{document}: {command}"


def test_exit_codes_are_those_of_the_help() -> None:
    listed = {row[0]: row[1] for row in table(section("Commands")) if row[0].isdigit()}
    in_help = dict(re.findall(r"^ +(\d+)  (.+)$", str(cli.app.info.help), re.M))
    assert listed == in_help
    assert {int(code) for code in listed} >= {int(code) for code in ExitCode}


def test_environment_names_are_all_there() -> None:
    names = set(re.findall(r"`([A-Z][A-Z_]+)`", section("Your own comparison")))
    assert names == {*config.ENVIRONMENT, "ANALYZE_ONLY"}


def test_formats_of_the_command_line_are_those_that_are_parsed() -> None:
    assert {name.value for name in cli.Format} - {"auto"} == set(parse.FORMATS) - {"jsonl"}


# What documents say of files


def test_shipped_specs_are_all_listed() -> None:
    rows = {row[0].strip("`") for row in table(section("On GPUs"))}
    assert rows == {path.stem for path in resources.configs()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    assert "(docs/method.md)" in README
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])((?:dcpbench|configs|runners|docs|tests|benchmarks|\.ci)/[\w./-]*\w)", text))
    named |= set(re.findall(r"\]\(([\w./-]+)\)", text))
    named = {name for name in named if "NAME" not in name and not name.endswith("longest_first.py")}
    missing = {name for name in named if not ((ROOT / name).exists() or (document.parent / name).exists())}
    assert not missing


def test_the_run_folder_holds_what_the_table_says() -> None:
    named = set(re.findall(r"`([\w./<>]+)`", section("The run folder")))
    folder = runfolder.RunFolder(Path())
    launch = plan.build(config.load(Path("quick_4xcpu"), environ={}).spec, Path())[0]
    wanted = {str(path) for path in (folder.spec, folder.plan, folder.ledger, folder.manifest)}
    wanted |= {f"{path}/" for path in (folder.data, folder.analysis)}
    wanted |= {launch.file.name, launch.log.name, launch.records.name, "gpu.csv", "launches/<id>/", *report.FILES}
    assert wanted <= named


def test_the_example_spec_is_valid(tmp_path: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", README, re.S)[0]
    (tmp_path / "my_model.yaml").write_text(text, encoding="utf-8")
    spec = config.load(tmp_path / "my_model.yaml", environ={}).spec
    assert spec.topology.dp == 2  # as its comment says
    assert len(plan.build(spec, tmp_path)) == 12


def test_tables_of_results_are_there() -> None:
    shown = section("What comes out")
    assert shown.count("PASSED") >= 2, "one result each for generated and for real data"
    assert len(re.findall(r"^\| microbatches by CP size \|.*CP 1: .*CP 2: .*CP 4: ", shown, re.M)) >= 2


# The example of docs/extending.md


@pytest.fixture(scope="module")
def longest_first() -> types.ModuleType:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    source = re.findall(r'```python\n(""".*?)```', text, re.S)[0]
    module = types.ModuleType("longest_first")
    sys.modules["longest_first"] = module  # dataclasses look themselves up there
    exec(compile(source, "longest_first.py", "exec"), module.__dict__)
    return module


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 512 * 4), min_size=1, max_size=24),
    policy=st.sampled_from(["minimal", "megatron"]),
)
def test_the_example_scheduler_plans(
    longest_first: types.ModuleType, lengths: list[int], policy: PaddingPolicy
) -> None:
    scheduler = longest_first.LongestFirst.create(domain=Domain(4, 4), capacity=512, min_size=1, padding_policy=policy)
    planned = scheduler.plan(lengths)  # ends with check_plan
    assert len(planned.jobs) == len(lengths)
    assert scheduler.plan(lengths) == planned


# Dependencies


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert canonicalize_name(requirement.name) not in found, f"{requirement.name} is there twice"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


PINS = pins()


def declared(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    lines = PROJECT["project"]["dependencies"] + [line for extra in extras for line in optional[extra]]
    return [Requirement(line) for line in lines + PROJECT["build-system"]["requires"]]


def only_cuda(name: str) -> bool:
    return name.startswith(("nvidia-", "cuda-")) or name == "triton"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned(python: str) -> None:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    unpinned: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in declared("data", "gpu", "test")]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in PINS:
            unpinned |= set() if only_cuda(name) else {name}
            continue
        assert Version(PINS[name]) in requirement.specifier, f"{requirement} forbids the pinned {PINS[name]}"
        try:
            further = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue  # of the extra `gpu`, which is not installed for the tests
        for wanted in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, wanted))
            waiting += [(below, wanted) for below in further]
    assert not unpinned
    assert len(seen) > 30


def test_the_supported_versions_agree() -> None:
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    classifiers = PROJECT["project"]["classifiers"]
    assert [c.rpartition(" ")[2] for c in classifiers if ":: Python :: 3." in c] == list(PYTHONS)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == list(PYTHONS)
    assert {"make lint", "make test", "make run"} <= {step.get("run") for step in job["steps"]}


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what it is made of."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("dcpbench", "configs", "runners"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from hatchling.build import build_wheel\nbuild_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_what_comes_with_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"dcpbench-{dcpbench.__version__}.dist-info/entry_points.txt").decode()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "dcpbench").rglob("*.py")}
    assert sources <= names
    assert {"dcpbench/py.typed", f"dcpbench-{dcpbench.__version__}.dist-info/licenses/LICENSE"} <= names
    assert {f"dcpbench/configs/{path.name}" for path in resources.configs()} <= names
    assert {f"dcpbench/runners/{path.name}" for path in RUNNERS} <= names
    assert {f"dcpbench/dcp/profiles/{path.name}" for path in cost_profiles.SHIPPED.glob("*.json")} <= names
    assert "dcpbench/dcp/profiles/h200-1b.json" in names
    assert {name.split("/")[0] for name in names} == {"dcpbench", f"dcpbench-{dcpbench.__version__}.dist-info"}
    assert "dcpbench = dcpbench.cli:main" in entry_points


def test_an_installed_wheel_finds_its_specs_and_runners(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environ = {**bare_environment(), "PYTHONPATH": str(site)}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    where = python(
        "-c", "from dcpbench.settings import resources; print(*map(resources.folder, ('configs', 'runners')))"
    ).split()
    assert where == [str(site / "dcpbench" / "configs"), str(site / "dcpbench" / "runners")]
    shown = python("-m", "dcpbench", "run", "quick_4xcpu", "--dry-run")
    assert "01-baseline" in shown
    assert "02-dcp" in shown
    assert list(csv.reader([shown.splitlines()[-1]])) == [["4 launches; none was made and nothing was written."]]


def test_a_checkout_finds_its_specs_and_runners() -> None:
    assert resources.folder("configs") == ROOT / "configs"
    assert resources.folder("runners") == ROOT / "runners"


# Scripts


@pytest.mark.parametrize("script", [*RUNNERS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_sound_bash(script: Path) -> None:
    assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda path: path.name)
def test_runners_hand_their_arguments_to_dcpbench(runner: Path, tmp_path: Path, with_command: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(runner), "quick_4xcpu", "--pairs", "1", "--set", "launches.timeout=77"],
        cwd=tmp_path,
        env={**with_command, "DRY_RUN": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "2 launches; none was made and nothing was written." in done.stdout
    assert "at most 77 s" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda path: path.name)
def test_runners_pass_on_the_exit_code(runner: Path, tmp_path: Path, with_command: dict[str, str]) -> None:
    # More GPUs than any machine has: refused by preflight, on machines with and without GPUs.
    wanted = ["--set", "topology.device=cuda", "--set", "topology.gpus_per_node=4096"]
    done = subprocess.run(
        ["bash", str(runner), "quick_4xcpu", *wanted, "--set", "training.global_batch_size=4096"],
        cwd=tmp_path,
        env=with_command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == ExitCode.PREFLIGHT, done.stderr
    assert "gpus_per_node" in done.stderr


@pytest.mark.parametrize("target", ["run", "test", "lint"])
def test_make_makes_its_own_environment_with_the_pins(target: str) -> None:
    # -W: as if the declared dependencies had just changed.
    command = ["make", "--dry-run", "-W", "pyproject.toml", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    folder = ".venv" if target == "run" else ".venv-test"
    lines = done.stdout.splitlines()
    (install,) = [line for line in lines if " -m pip install " in line]
    assert install.startswith(f"{folder}/bin/python ")
    assert any(line.endswith(f" -m venv --clear {folder}") for line in lines[: lines.index(install)])
    assert all(
        line.startswith(f"{folder}/bin/") for line in lines if re.search(r"\b(dcpbench run|pytest|ruff|mypy)\b", line)
    )
    assert "export PIP_CONSTRAINT := constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_ci_runs_the_commands_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make lint", "make run", "make test"]
    for target in ("run", "test"):
        assert re.search(rf"^    make {target} +#", README, re.M)
