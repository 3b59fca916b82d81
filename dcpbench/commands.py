"""What each command does once its options are read. Results go to stdout; each returns the exit code.

Analysis and reports load scipy and pandas, which takes a second: they are imported where they are
used, so that a wrong option or a dry run is answered at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dcpbench import campaign, config, environment, launch, plan, preflight
from dcpbench import manifest as manifests
from dcpbench.analysis import manifest_summary
from dcpbench.checks.gpus import GpuSurvey, survey
from dcpbench.config import ResolvedSpec
from dcpbench.data.prepare import prepare
from dcpbench.data.stream import SampleStream
from dcpbench.errors import DcpbenchError, ExitCode, LaunchError, RecordsError, UsageError
from dcpbench.launching import progress
from dcpbench.launching.interrupts import Interrupts
from dcpbench.preflight import PreflightReport
from dcpbench.redact import redact, redact_value
from dcpbench.runfolder import layout as runfolder
from dcpbench.settings import resources
from dcpbench.spec import Decision, Spec, Tolerances

if TYPE_CHECKING:
    from dcpbench.analysis.pipeline import Analysis


def resolve(spec: Path | None, overrides: Sequence[str], options: Mapping[str, tuple[str, Any]]) -> ResolvedSpec:
    """The spec with environment, `--set` and options applied."""
    file = None if spec is None else resources.spec_file(spec)
    resolved = config.load(file, environ=os.environ, overrides=overrides, options=options)
    if resolved.spec.mode == "lockstep" and "launches.pairs" in options:
        # How often is asked with one option, whatever a launch is.
        renamed = {"lockstep.launches" if name == "launches.pairs" else name: given for name, given in options.items()}
        if options["launches.pairs"][0] == "--quick" and resolved.sources["lockstep.control"] == "default":
            renamed["lockstep.control"] = ("--quick", "never")
        resolved = config.load(file, environ=os.environ, overrides=overrides, options=renamed)
    return resolved


def run(resolved: ResolvedSpec, *, resume: bool, as_json: bool) -> int:
    """Launch, analyse, report, write the manifest."""
    path = runfolder.default_path(resolved.spec)
    failure: DcpbenchError | None = None
    with Interrupts() as interrupts, progress.on() as display:
        prepared = campaign.begin(resolved.spec, path, resume=resume, environ=os.environ, listener=display)
        # Now: a refusal does not wait for scipy, and what cannot be imported is known before the first launch.
        from dcpbench import report as reports  # noqa: PLC0415
        from dcpbench.analysis import pipeline  # noqa: PLC0415

        folder = prepared.folder
        executor = campaign.TorchrunExecutor(display, os.environ, prepared.cpu, interrupts)
        try:
            campaign.walk(
                prepared.launches,
                ledger_file=folder.ledger,
                executor=executor,
                listener=display,
                interrupts=interrupts,
            )
            campaign.make_control(
                plan.control(prepared.launches, cpu=prepared.cpu),
                prepared.launches,
                ledger_file=folder.ledger,
                executor=executor,
                listener=display,
                interrupts=interrupts,
            )
        except (LaunchError, RecordsError) as error:
            failure = error  # the report says what is there of both cases, and lists every fault
        display.phase("analysing")
        try:
            result = pipeline.analyze_run(path)
            # The report repeats some of the manifest, and the manifest holds the hashes of the report.
            whole = manifests.build(path, resolved, _statistics(result), environ=os.environ, gpus=prepared.gpus)
            reports.write(replace(result, provenance=manifest_summary.summary(whole)), folder.analysis)
            manifests.store(path, whole)
        except DcpbenchError as error:
            raise (failure or error) from None
        display.note(f"the run folder is {path}")
    _show(result, as_json)
    if failure is not None:
        raise failure
    return result.verdict.exit_code


_CONDITION = "where launches of the same case have equal losses to the last bit"


def dry_run(resolved: ResolvedSpec, *, as_json: bool) -> int:
    """Print every launch; launch and write nothing."""
    spec = resolved.spec
    cpu = preflight.resolve_device(spec, survey(os.environ)) == "cpu"
    launches = []
    plans = plan.build(spec, runfolder.default_path(spec))
    control = plan.control(plans, cpu=cpu)
    for planned in [*plans, *([control] if control else [])]:
        command = plan.command(planned, os.environ)
        environ = launch.environment(os.environ, planned, cpu=cpu, cores=launch.cores())
        launches.append(
            {
                "id": planned.id,
                "pair": planned.pair,
                "case": planned.case,
                "position": planned.position,
                "argv": command.argv,
                "environment": sorted({*environ, *command.environment}),
                "estimated_seconds": None,
                "limit_seconds": spec.launches.timeout,
                "condition": _CONDITION if planned is control and campaign.only_where_equal(planned) else None,
            }
        )
    shown = redact_value(launches, identity=False)
    if as_json:
        _out(json.dumps({"schema_version": 1, "launches": shown}, indent=2, allow_nan=False))
        return ExitCode.PASSED
    for item in shown:
        which = f"pair {item['pair']}, " if item["pair"] else ""
        _out(f"{item['position']}. {item['id']} ({which}{item['case']})")
        if item["case"] == "lockstep":
            sides = (
                "with the baseline on both sides (A/A)" if item["id"] == plan.LOCKSTEP_CONTROL else "under both cases"
            )
            _out(f"   every iteration {sides}, at the same weights; order {spec.launches.order}")
        _out(f"   command: {shlex.join(item['argv'])}")
        _out(f"   environment: {' '.join(item['environment'])}")
        if item["condition"]:
            _out(f"   only {item['condition']}")
        _out(f"   time: unknown before it has run; at most {item['limit_seconds']:g} s (launches.timeout)")
    _out(f"{len(shown)} launches; none was made and nothing was written.")
    return ExitCode.PASSED


def analyze_existing(resolved: ResolvedSpec, *, as_json: bool) -> int:
    """`run` under `ANALYZE_ONLY=1`: recompute the analysis of the run folder that the spec names."""
    path = resolved.spec.output.dir
    if path is None:
        raise UsageError("ANALYZE_ONLY=1 launches nothing, so it needs an earlier run: give --out DIR or OUTPUT_DIR")
    tolerances, decision = resolved.spec.tolerances.model_dump(), resolved.spec.decision.model_dump()
    return analyze_run(path, analyze_only=True, warmup=None, tolerances=tolerances, decision=decision, as_json=as_json)


def analyze_run(
    path: Path,
    *,
    analyze_only: bool,
    warmup: int | None,
    tolerances: Mapping[str, Any],
    decision: Mapping[str, Any],
    as_json: bool,
) -> int:
    """Recompute the analysis of a run folder; without `analyze_only` refresh the manifest's results."""
    from dcpbench import report as reports  # noqa: PLC0415
    from dcpbench.analysis import pipeline  # noqa: PLC0415

    folder = runfolder.existing(path)
    stored = config.load(folder.spec, environ={}).spec
    result = pipeline.analyze_run(
        path,
        tolerances=_merged(stored.tolerances, tolerances),
        warmup=warmup,
        decision=_decision(stored.decision, decision),
    )
    reports.write(replace(result, provenance=manifest_summary.of_run(path)), folder.analysis)
    if not analyze_only:
        manifests.refresh_results(path, _statistics(result))
    _show(result, as_json)
    return result.verdict.exit_code


def analyze_logs(
    baseline: Sequence[Path],
    dcp: Sequence[Path],
    *,
    format: str,
    out: Path | None,
    iterations: int | None,
    warmup: int | None,
    global_batch_size: int | None,
    tolerances: Mapping[str, Any],
    decision: Mapping[str, Any],
    as_json: bool,
) -> int:
    """Compare console logs made anywhere; files are written only where `out` says."""
    from dcpbench import report as reports  # noqa: PLC0415
    from dcpbench.analysis import pipeline  # noqa: PLC0415

    result = pipeline.analyze_logs(
        baseline,
        dcp,
        format=format,
        iterations=iterations,
        warmup=warmup,
        global_batch_size=global_batch_size,
        tolerances=_merged(Tolerances(), tolerances),
        decision=_decision(Decision(), decision),
    )
    if out is not None:
        reports.write(result, out)
    _show(result, as_json)
    return result.verdict.exit_code


def manifest(path: Path, *, check: bool) -> int:
    """Print the manifest; with `check` look whether it, the files and their secrecy are sound."""
    folder = runfolder.existing(path)
    if not check:
        manifests.read(path)
        _out(folder.manifest.read_text(encoding="utf-8").rstrip("\n"))
        return ExitCode.PASSED
    problems = manifests.check(path)
    for problem in problems:
        _out(redact(problem))
    if not problems:
        _out(f"{folder.manifest}: schema, hashes and secrecy are sound")
    return ExitCode.GATE_FAILED if problems else ExitCode.PASSED


def check(spec: Path | None, *, overrides: Sequence[str], as_json: bool) -> int:
    """What is installed and what the GPUs do and, where a spec is given, whether it can run here."""
    if spec is None and overrides:
        raise UsageError("--set changes a spec; name the spec: dcpbench check SPEC --set ...")
    gpus = survey(os.environ)
    report = None if spec is None else _inspect(resolve(spec, overrides, {}).spec, gpus)
    found = environment.probe(os.environ, gpus)
    if as_json:
        _out(json.dumps(redact_value({**found, "preflight": report and report.to_dict()}), indent=2, allow_nan=False))
    else:
        versions = {"dcpbench": found["dcpbench"]["version"], "python": found["machine"]["python"], **found["packages"]}
        _out(", ".join(f"{name} {version}" for name, version in versions.items()))
        _out(f"driver {gpus.driver or 'none'}, {len(gpus.gpus)} GPUs, {found['machine']['cpu']['usable']} CPU cores")
        for gpu in gpus.gpus:
            doing = "unknown load" if gpu.processes is None else f"{gpu.processes} compute processes"
            _out(f"GPU {gpu.name}: {gpu.model}, {doing}")
        for finding in report.findings if report else ():
            _out(f"{finding.level:<6}  {redact(finding.message)}")
    if report is not None:
        report.require()
    return ExitCode.PASSED


def _inspect(spec: Spec, gpus: GpuSurvey) -> PreflightReport:
    report = preflight.inspect(spec, environ=os.environ, gpus=gpus)
    if report.refusals:
        return report
    with TemporaryDirectory(prefix="dcpbench-check-") as scratch, Interrupts():
        prepare(spec, Path(scratch) / "data")
        stream = SampleStream.open(Path(scratch) / "data")
        return preflight.inspect(spec, environ=os.environ, stream=stream, gpus=gpus)


_REPORT_FILES = {
    "markdown": "report.md",
    "html": "report.html",
    "csv": "summary.csv",
    "json": "statistics.json",
}
"""Value of `report --format` -> the file of the analysis that holds it."""


def show_report(path: Path, *, format: str, as_json: bool) -> int:
    """Write the report files of a finished run again, from its stored records, and show the report in a format."""
    from dcpbench import report as reports  # noqa: PLC0415
    from dcpbench.analysis import pipeline  # noqa: PLC0415

    folder = runfolder.existing(path)
    result = replace(pipeline.analyze_run(path), provenance=manifest_summary.of_run(path))
    for file in reports.write(result, folder.analysis):
        sys.stderr.write(f"dcpbench: wrote {file}\n")
    if format == "text" or as_json:
        _show(result, as_json)
    else:
        from dcpbench.report import ci  # noqa: PLC0415

        if format in _REPORT_FILES:
            text = (folder.analysis / _REPORT_FILES[format]).read_text(encoding="utf-8")
        else:
            text = redact(ci.FORMATS[format](result))
        _out(text.rstrip("\n"))
    return ExitCode.PASSED


def compare(
    first: Path, second: Path, *, allow: Sequence[str], required: bool, format: str = "text", as_json: bool
) -> int:
    """Two finished runs side by side."""
    from dcpbench.analysis import comparison  # noqa: PLC0415
    from dcpbench.report import compared  # noqa: PLC0415

    found = comparison.compare(first, second, allow=allow, required=required)
    if as_json:
        document = {"schema_version": 1, **asdict(found), "exit_code": int(found.exit_code)}
        _out(json.dumps(redact_value(document, identity=False), indent=2, allow_nan=False))
        return found.exit_code
    if format != "text":
        _out(redact(compared.FORMATS[format](found)).rstrip("\n"))
        return found.exit_code
    _out(redact(compared.headline(found), identity=False))
    _table(("", *found.runs, *compared.COLUMNS), compared.rows(found))
    for note in found.notes:
        _out(redact(f"Note: {note}"))
    return found.exit_code


def list_runs(folder: Path, *, as_json: bool) -> int:
    """The run folders below a folder."""
    from dcpbench.runfolder import history  # noqa: PLC0415

    found = history.runs(folder)
    if as_json:
        document = {"schema_version": 1, "runs": [asdict(run) for run in found]}
        _out(json.dumps(redact_value(document, identity=False), indent=2, allow_nan=False))
        return ExitCode.PASSED
    controlled = any(run.aa is not None for run in found)
    rows = [
        (
            run.when or "never launched",
            run.spec,
            run.mode,
            str(run.pairs),
            "-" if run.speedup is None else f"{run.speedup:.3f}",
            "-" if run.low is None else f"{run.low:.3f} to {run.high:.3f}",
            *(["-" if run.aa_low is None else f"{run.aa_low:.3f} to {run.aa_high:.3f}"] if controlled else []),
            run.speed or "-",
            run.verdict or "not analysed",
            run.path,
        )
        for run in found
    ]
    if not rows:
        _out(f"{folder} holds no run folder")
        return ExitCode.PASSED
    columns = ("started", "spec", "mode", "pairs", "speed-up", "95 % interval", *(["A/A"] if controlled else []),
               "speed", "verdict", "run folder")  # fmt: skip
    _table(columns, rows)
    return ExitCode.PASSED


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(Text(redact(cell, identity=False)) for cell in row))
    screen = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    with screen.capture() as capture:
        screen.print(table)
    _out(capture.get().rstrip("\n"))


def _merged(stored: Tolerances, given: Mapping[str, Any]) -> Tolerances:
    changed = {name: value for name, value in given.items() if value is not None}
    for name in ("loss_atol", "loss_rtol"):
        if not 0 <= changed.get(name, 0.0) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a number of at least 0")
    return stored.model_copy(update=changed)


def _decision(stored: Decision, given: Mapping[str, Any]) -> Decision:
    changed = {name: value for name, value in given.items() if value is not None}
    if not 0 < changed.get("min_speedup", 1.0) < float("inf"):
        raise UsageError("--min-speedup must be a number above 0")
    return stored.model_copy(update=changed)


def _statistics(result: Analysis) -> dict[str, Any]:
    from dcpbench import report  # noqa: PLC0415

    content = report.FILES["statistics.json"](result)
    assert content is not None
    statistics: dict[str, Any] = json.loads(content)
    return statistics


def _show(result: Analysis, as_json: bool) -> None:
    if as_json:
        _out(json.dumps(_statistics(result), indent=2, allow_nan=False))
        return
    from rich.console import Console  # noqa: PLC0415

    from dcpbench.report import console  # noqa: PLC0415

    # A file has no width; 120 columns keep every table whole.
    screen = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    with screen.capture() as capture:
        screen.print(console.render(result))
    _out(capture.get().rstrip("\n"))


def _out(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()


def _close_stdout() -> None:
    # The reader (`head`) has seen enough. The verdict still decides the exit status.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
