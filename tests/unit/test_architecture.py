"""The dependency rules: what may import what, read from the sources and tried in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcpbench

PACKAGE = Path(dcpbench.__file__).resolve().parent
MOST_LINES = 500

LIGHT = ("cli", "commands", "spec", "config", "plan", "campaign", "launch", "preflight", "errors", "records")
"""Modules that load while the user waits for an answer."""
LIGHT_PACKAGES = ("settings", "checks", "launching", "runfolder", "provenance", "planner")
"""Packages of which no module may be slow to load."""
HEAVY = ("torch", "transformer_engine", "pandas", "scipy")
TOP = {
    "__main__", "cli", "cli_options", "commands", "errors", "spec", "config", "plan", "preflight", "campaign", "launch",
    "telemetry", "records", "table", "profiles", "faults", "align", "verdict", "manifest", "environment", "redact",
}  # fmt: skip
"""The modules beside the packages: the stages themselves. What a stage is built of lies in a package."""
RANKS = {
    stage: height
    for height, stages in enumerate(
        (
            ("errors", "provenance"),
            ("spec", "records", "profiles", "telemetry", "redact", "stats"),
            ("settings", "data", "table"),
            ("config", "dcp", "parse"),
            ("plan", "checks"),
            ("runfolder", "launching", "preflight", "environment", "faults"),
            ("launch", "align", "verdict", "manifest"),
            ("campaign", "analysis"),
            ("report",),
            ("planner", "commands"),
            ("calibration", "cli_options"),
            ("cli",),
            ("__main__",),
        )
    )
    for stage in stages
}
"""Stage -> height in its chain; a stage may import what is lower, never what is higher or as high."""
WITHOUT_RANK = {"megatron", "worker"}
"""A runner hooks into several stages; what the worker may import has a rule of its own."""


def modules() -> dict[str, Path]:
    """Dotted name below `dcpbench` -> file; a package goes by its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Dotted names a file imports; where `everywhere` is false, only those that importing the file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else list(_at_import(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _at_import(child)


def own(name: str) -> str | None:
    """The dcpbench module that an imported name is or lies in; None for any other package."""
    if not name.startswith("dcpbench."):
        return None
    rest = name.removeprefix("dcpbench.")
    while rest not in MODULES and "." in rest:
        rest = rest.rpartition(".")[0]
    return rest if rest in MODULES else None


def loaded(module: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after importing a module."""
    code = f"import sys, dcpbench.{module}\nprint(*sorted(set({names!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_reader_of_imports_sees_what_it_has_to(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import os\nfrom dcpbench.worker import loop\nif TYPE_CHECKING:\n    import pandas\n"
        "def f() -> None:\n    import torch\n"
    )
    assert set(imports(file)) == {"os", "dcpbench.worker.loop", "pandas", "torch"}
    assert set(imports(file, everywhere=False)) == {"os", "dcpbench.worker.loop"}
    assert own("dcpbench.worker.loop.train") == "worker.loop"
    assert own("numpy") is None


@pytest.mark.parametrize("module", LIGHT)
def test_modules_that_answer_at_once_load_nothing_heavy(module: str) -> None:
    assert loaded(module, HEAVY) == []


@pytest.mark.parametrize("package", LIGHT_PACKAGES)
def test_packages_that_answer_at_once_load_nothing_heavy(package: str) -> None:
    modules = [name for name in MODULES if name.split(".")[0] == package]
    assert len(modules) > 1
    assert loaded(", dcpbench.".join(modules), HEAVY) == []


def test_schedulers_and_workload_run_without_torch() -> None:
    assert loaded("dcp.schedulers, dcpbench.dcp.workload", ("torch",)) == []
    for name, path in MODULES.items():
        if name.startswith("dcp.schedulers") or name == "dcp.workload":
            assert not [found for found in imports(path) if found.split(".")[0] == "torch"], name


def test_statistics_load_neither_pandas_nor_rich() -> None:
    modules = [name for name in MODULES if name.startswith("stats")]
    assert len(modules) > 1
    assert loaded(", dcpbench.".join(modules), ("pandas", "rich")) == []


def test_reports_compute_no_statistic() -> None:
    for name, path in MODULES.items():
        if name == "report" or name.startswith("report.") or name == "planner.shown":
            found = set(imports(path))
            assert not {word.split(".")[0] for word in found} & {"scipy", "statistics", "math", "pandas"}, name
            assert not [word for word in found if word.startswith("dcpbench.stats")], name


def test_only_the_worker_imports_the_worker() -> None:
    for name, path in MODULES.items():
        if not name.startswith("worker"):
            assert not [word for word in imports(path) if word.startswith("dcpbench.worker")], name


def test_the_worker_imports_no_stage_of_the_orchestration_but_its_contracts() -> None:
    shared = {"dcp", "data", "records", "profiles", "plan", "spec", "errors", "worker"}
    for name, path in MODULES.items():
        if name.startswith("worker"):
            used = {word for word in map(own, imports(path)) if word}
            assert {word.split(".")[0] for word in used} <= shared, name


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[0] in RANKS])
def test_dependencies_point_one_way(name: str) -> None:
    stage = name.split(".", maxsplit=1)[0]
    higher = {
        target
        for target in (own(word) for word in imports(MODULES[name], everywhere=False))
        if target and target.split(".")[0] != stage and RANKS.get(target.split(".")[0], -1) >= RANKS[stage]
    }
    assert not higher


def test_every_stage_has_its_height() -> None:
    stages = {name.split(".")[0] for name in MODULES if name}
    assert stages == set(RANKS) | WITHOUT_RANK


def test_the_top_holds_the_stages_alone() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP | {"__init__"}


def test_the_tree_in_the_documents_is_the_tree() -> None:
    text = (PACKAGE.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    tree = text.partition("```text\ndcpbench/\n")[2].partition("```")[0]
    listed = [word for line in tree.splitlines() for word in line[:33].replace(",", " ").split()]
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(listed) == sorted({f"{name}.py" for name in TOP} | packages)


def test_no_two_modules_import_each_other() -> None:
    graph = {
        name: {target for target in map(own, imports(path, everywhere=False)) if target and target != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                walk(target, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_every_module_is_short_and_says_what_it_is() -> None:
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MOST_LINES, name
        assert ast.get_docstring(ast.parse(text)), name
