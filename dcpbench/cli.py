"""The command line: commands, options, exit codes. What a command does is in `commands.py`.

Nothing heavy is imported before a command runs, so that `--help` and completion answer at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dcpbench import __version__
from dcpbench.cli_options import (
    AnalyzeOnly,
    Atol,
    CheckParity,
    Compared,
    Debug,
    Decide,
    Format,
    IntervalOption,
    Json,
    MinSpeedup,
    Order,
    Overrides,
    Rtol,
    RunPath,
    Shown,
    SpecFile,
    complete_spec,
)
from dcpbench.errors import DcpbenchError, ExitCode, UsageError

_HELP = """How much faster is dynamic context parallelism than fixed, and does the loss stay the same?

\b
Exit codes:
    0  passed
    1  a gate failed: loss parity, or a requested minimum speed-up
    2  usage or spec error
    3  inconclusive
    4  a launch failed
    5  records incomplete or misaligned
    6  preflight refused
   70  internal error: a fault of dcpbench itself
  124  timeout
  130  interrupted

\b
Progress goes to stderr, results to stdout. NO_COLOR is honoured.
"""

app = typer.Typer(
    name="dcpbench",
    help=_HELP,
    no_args_is_help=True,
    # Plain help and plain errors: importing rich would cost more time than all the rest of `--help`.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcpbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    # Options of the program as a whole; the commands follow.
    pass


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    pairs: Annotated[int | None, typer.Option("--pairs", help="Launches of each case.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two pairs: a look, never a decision.")] = False,
    rigorous: Annotated[bool, typer.Option("--rigorous", help="Ten pairs.")] = False,
    order: Annotated[Order | None, typer.Option("--order", help="Which case goes first in each pair.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every launch; launch and write nothing.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds one launch may take.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a launch has failed.")] = False,
    profile: Annotated[
        list[int],
        typer.Option("--profile", metavar="ITERATION", help="Trace this iteration on every rank; repeatable.", min=1),
    ] = [],  # noqa: B006
    min_speedup: MinSpeedup = None,
    interval: IntervalOption = None,
    decide: Decide = False,
    json: Json = False,
    analyze_only: Annotated[bool, typer.Option("--analyze-only", envvar="ANALYZE_ONLY", hidden=True)] = False,
    debug: Debug = False,
) -> None:
    """Launch the pairs of a spec, compare them, write report and manifest."""
    from dcpbench import commands  # noqa: PLC0415

    given = {
        "launches.pairs": _pairs(pairs, quick, rigorous),
        "launches.order": ("--order", order and order.value),
        "launches.timeout": ("--timeout", timeout),
        "launches.keep_going": ("--keep-going", keep_going or None),
        "training.profile_iterations": ("--profile", profile or None),
        "decision.min_speedup": ("--min-speedup", min_speedup),
        "decision.interval": ("--interval", interval and interval.value),
        "decision.required": ("--decide", decide or None),
        "output.dir": ("--out", out and str(out)),
    }
    options = {field: value for field, value in given.items() if value[1] is not None}
    resolved = commands.resolve(spec, overrides, options)
    if dry_run:
        _exit(commands.dry_run(resolved, as_json=json))
    if analyze_only:
        _exit(commands.analyze_existing(resolved, as_json=json))
    _exit(commands.run(resolved, resume=resume, as_json=json))


@app.command()
def analyze(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run folder.")] = None,
    analyze_only: AnalyzeOnly = False,
    baseline_log: Annotated[
        list[Path], typer.Option("--baseline-log", help="Console log of a baseline launch; once for each pair.")
    ] = [],  # noqa: B006
    dcp_log: Annotated[
        list[Path], typer.Option("--dcp-log", help="Console log of a dcp launch; once for each pair.")
    ] = [],  # noqa: B006
    format: Annotated[Format, typer.Option("--format", help="Format of the logs.")] = Format.auto,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", envvar="OUTPUT_DIR", show_envvar=True, help="Write the reports of logs here."
        ),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(envvar="TRAIN_ITERS", show_envvar=True, help="Iterations of each log.", min=1)
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(envvar="WARMUP_ITERS", show_envvar=True, help="First iterations to leave out.", min=0)
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(envvar="GLOBAL_BATCH_SIZE", show_envvar=True, help="Samples of one iteration.", min=1)
    ] = None,
    loss_atol: Atol = None,
    loss_rtol: Rtol = None,
    check_loss_parity: CheckParity = None,
    min_speedup: MinSpeedup = None,
    interval: IntervalOption = None,
    decide: Decide = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Recompute the report of a run folder, or compare console logs made elsewhere. Launches nothing."""
    from dcpbench import commands  # noqa: PLC0415

    tolerances = {"loss_atol": loss_atol, "loss_rtol": loss_rtol, "check_loss_parity": check_loss_parity}
    decision = {
        "min_speedup": min_speedup,
        "interval": interval and interval.value,
        "required": decide or None,
    }
    logs = baseline_log or dcp_log
    if run is not None and logs:
        raise UsageError("give a run folder, or --baseline-log with --dcp-log, not both")
    if run is None and not logs:
        raise UsageError("give a run folder, or --baseline-log with --dcp-log; see dcpbench analyze --help")
    if run is not None:
        _exit(
            commands.analyze_run(
                run,
                analyze_only=analyze_only,
                warmup=warmup,
                tolerances=tolerances,
                decision=decision,
                as_json=json,
            )
        )
    _exit(
        commands.analyze_logs(
            baseline_log,
            dcp_log,
            format=format.value,
            out=out,
            iterations=iterations,
            warmup=warmup,
            global_batch_size=global_batch_size,
            tolerances=tolerances,
            decision=decision,
            as_json=json,
        )
    )


@app.command()
def manifest(
    run: RunPath,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the schema, hash the artifacts again, look for secrets.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Print the manifest of a run, or check it."""
    from dcpbench import commands  # noqa: PLC0415

    _exit(commands.manifest(run, check=check))


@app.command()
def check(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="A spec file.", autocompletion=complete_spec)
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Preflight only: versions, GPUs idle, topology, data and tokenizer readable."""
    from dcpbench import commands  # noqa: PLC0415

    _exit(commands.check(spec, overrides=overrides, as_json=json))


@app.command()
def plan(
    spec: SpecFile,
    overrides: Overrides = [],  # noqa: B006
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Ranks of the DPxCP domain, real or imagined.", min=1)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="M", help="Nodes; with --ranks, nodes of 8 otherwise.", min=1)
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", metavar="GB/S[,GB/S]", help="Bandwidth of a rank within a node, between nodes."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="S", help="Samples of a global batch.", min=1)
    ] = None,
    batches: Annotated[
        int | None, typer.Option("--batches", metavar="B", help="Batches to average over; default: up to 8.", min=1)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Draw the batches at random, not in the order of the run.", min=0, max=2**32 - 1),
    ] = None,
    lengths_csv: Annotated[
        Path | None, typer.Option("--lengths-csv", metavar="FILE", help="Lengths from a CSV file.")
    ] = None,
    schedulers: Annotated[
        str | None, typer.Option("--schedulers", metavar="A,B", help="Schedulers to compare; default: all.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="FILE", help="Cost profile: a file, a name, or auto.")
    ] = None,
    sweep: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            metavar="KEY=VALUES",
            help="capacity=, cp=, min_cp= with numbers, A:B (doubling) or A:B:STEP; repeatable.",
        ),
    ] = [],  # noqa: B006
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="T", help="Tokens a rank can hold; default: the spec's capacity.", min=1),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Planning time of one scheduler and setting.")
    ] = 10.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write plan.html, packing.png, plan.csv, plan.json.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """How each scheduler would pack the data, and the predicted times. Needs no GPU."""
    from dcpbench import commands  # noqa: PLC0415
    from dcpbench.planner import command as plan_command  # noqa: PLC0415
    from dcpbench.settings import resources  # noqa: PLC0415

    given = {
        "data.kind": ("--lengths-csv", "csv" if lengths_csv else None),
        "data.path": ("--lengths-csv", lengths_csv and str(lengths_csv)),
        "schedule.costs": ("--profile", profile),
    }
    options = {field: value for field, value in given.items() if value[1] is not None}
    resolved = commands.resolve(spec, overrides, options)
    question = plan_command.Question(
        ranks=ranks,
        nodes=nodes,
        bandwidth=bandwidth,
        samples=samples,
        batches=batches,
        seed=seed,
        schedulers=schedulers,
        sweep=sweep,
        max_tokens=max_tokens,
        time_limit=time_limit,
        out=out,
    )
    _exit(plan_command.show(resolved.spec, question, as_json=json, spec_file=resources.spec_file(spec)))


@app.command()
def calibrate(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="The model, data and capacity to time.", autocompletion=complete_spec),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", help="Ranks to time on.", min=1)] = None,
    from_run: Annotated[
        list[Path],
        typer.Option("--from-run", metavar="RUN", help="Refit to a finished run; launches nothing; repeatable."),
    ] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The profile (.json), or its folder.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Time microbatches on this machine and fit the cost model that plans and predictions rest on."""
    from dcpbench.calibration import shown  # noqa: PLC0415

    _exit(shown.calibrate(spec, overrides, ranks=ranks, from_runs=from_run, out=out, as_json=json))


@app.command()
def report(
    run: RunPath,
    format: Annotated[
        Shown,
        typer.Option(
            "--format",
            help="text; markdown, html, csv, json: the file of that kind; junit: XML; github: annotations of GitHub "
            "Actions; summary: short Markdown.",
        ),
    ] = Shown.text,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the report files of a finished run again and show the report."""
    from dcpbench import commands  # noqa: PLC0415

    _exit(commands.show_report(run, format=format.value, as_json=json))


@app.command()
def compare(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run folder to compare with; judged itself with --baseline-run.")
    ],
    second: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The run folder that is judged.")] = None,
    baseline_run: Annotated[
        Path | None,
        typer.Option("--baseline-run", metavar="RUN", help="The run folder to compare with, for gates in CI."),
    ] = None,
    allow: Annotated[
        list[str], typer.Option("--allow", metavar="FIELD", help="A field of the spec that may differ; repeatable.")
    ] = [],  # noqa: B006
    format: Annotated[
        Compared,
        typer.Option(
            "--format", help="text; junit: XML; github: annotations of GitHub Actions; summary: short Markdown."
        ),
    ] = Compared.text,
    decide: Decide = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Two finished runs side by side; fails where dcp of the judged one is slower.

    `compare OLD NEW` and `compare NEW --baseline-run OLD` are the same.
    """
    from dcpbench import commands  # noqa: PLC0415

    if (second is None) == (baseline_run is None):
        raise UsageError("give two run folders, or one and --baseline-run with the one to compare it with")
    old, new = (run, second) if second is not None else (baseline_run, run)
    assert old is not None
    assert new is not None
    _exit(commands.compare(old, new, allow=allow, required=decide, format=format.value, as_json=json))


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the run folders lie.")] = Path("runs"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The run folders of a folder: when, which spec, and what came out."""
    from dcpbench import commands  # noqa: PLC0415

    _exit(commands.list_runs(folder, as_json=json))


def _pairs(pairs: int | None, quick: bool, rigorous: bool) -> tuple[str, int | None]:
    """The option that says how many pairs, and how many."""
    given = {"--pairs": pairs, "--quick": 2 if quick else None, "--rigorous": 10 if rigorous else None}
    chosen = [(option, number) for option, number in given.items() if number is not None]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(option for option, _ in chosen)} contradict each other; give one of them")
    return chosen[0] if chosen else ("--pairs", None)


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point of the `dcpbench` command: errors become one line on stderr and an exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = app(arguments, prog_name="dcpbench", standalone_mode=False)
    except DcpbenchError as error:
        code = _fail(error, str(error), error.exit_code, arguments)
    except (KeyboardInterrupt, typer.Abort) as error:
        code = _fail(error, "interrupted", ExitCode.INTERRUPTED, arguments)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _fail(error, f"{where}{error.strerror or error}", ExitCode.USAGE, arguments)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: a wrong option, a missing argument
            code = _usage(error)
        else:
            code = _fail(error, f"internal error: {type(error).__name__}: {error}; --debug shows where", 70, arguments)
    sys.exit(code or 0)


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "dcpbench"
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(text + "\n")
    else:
        _say(f"{text.rstrip('.')}; see {command} --help")
    return ExitCode.USAGE


def _fail(error: BaseException, sentence: str, code: int, arguments: list[str]) -> int:
    if "--debug" in arguments or os.environ.get("DCPBENCH_DEBUG", "0") not in {"", "0"}:
        traceback.print_exception(error)
    _say(sentence)
    return code


def _say(message: str) -> None:
    from dcpbench.redact import redact  # noqa: PLC0415 - most invocations have no error

    for line in message.splitlines():
        sys.stderr.write(f"dcpbench: error: {redact(line, identity=False)}\n")
