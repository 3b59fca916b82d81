"""`dcpbench calibrate` from its options to what it prints: the coefficients, and how well they fit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dcpbench import commands
from dcpbench.calibration import command
from dcpbench.calibration.command import Calibrated
from dcpbench.calibration.fit import Sample, relative_errors, timed_apart
from dcpbench.calibration.from_runs import Agreement
from dcpbench.dcp.cost_profiles import CostProfile
from dcpbench.dcp.refit import Refit
from dcpbench.errors import ExitCode, UsageError
from dcpbench.launching import progress
from dcpbench.launching.interrupts import Interrupts
from dcpbench.redact import redact, redact_value

COLUMNS = ("timed", "CP size", "number", "tokens", "ms", "mean error", "largest error")
AGREEMENT_COLUMNS = ("run", "scheduler", "iterations", "measured ms", "predicted ms", "difference", "error, held out")


def calibrate(
    spec: Path | None,
    overrides: Sequence[str],
    *,
    ranks: int | None,
    from_runs: Sequence[Path],
    out: Path | None,
    as_json: bool,
) -> int:
    """The whole command; exit code 1 where the fit is too poor to predict with.

    Raises:
        UsageError: not exactly one of a spec and a run, or an option that does not go with a run.
    """
    refitted: Refit | None = None
    agreements: list[Agreement] = []
    if from_runs:
        if spec is not None or overrides or ranks is not None:
            raise UsageError("--from-run takes everything from the run; leave out SPEC, --set and --ranks")
        made, refitted, agreements = command.refit_runs(from_runs, out)
    elif spec is None:
        raise UsageError("name a spec to calibrate, or a finished run with --from-run; see dcpbench calibrate --help")
    else:
        resolved = commands.resolve(spec, overrides, {}).spec
        measured = command.measured_spec(resolved, ranks)
        with Interrupts() as interrupts, progress.on() as display:
            made = command.calibrate(measured, out, environ=os.environ, listener=display, interrupts=interrupts)
    if as_json:
        text = json.dumps(redact_value(document(made, refitted, agreements), identity=False), indent=2, allow_nan=False)
    else:
        table = sample_rows(made.profile, made.samples)
        lines = [f"Cost profile {made.profile.name}:", *coefficient_lines(made.profile), ""]
        lines += [*_table([COLUMNS, *table]), ""] if table else []
        lines += [*_table([AGREEMENT_COLUMNS, *agreement_rows(agreements)]), ""] if agreements else []
        text = redact("\n".join([*lines, *verdict_lines(made, refitted)]), identity=False)
    sys.stdout.write(text + "\n")
    return ExitCode.GATE_FAILED if made.profile.refused else ExitCode.PASSED


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def document(made: Calibrated, refitted: Refit | None = None, agreements: Sequence[Agreement] = ()) -> dict[str, Any]:
    """The result as plain data."""
    content: dict[str, Any] = {
        "schema_version": 1,
        "usable": made.profile.refused is None,
        "refused": made.profile.refused,
        "file": None if made.file is None else str(made.file),
        "profile": made.profile.model_dump(mode="json"),
    }
    if refitted is not None:
        content["error_before"], content["error_after"] = refitted.before, refitted.after
        content["agreements"] = [asdict(one) for one in agreements]
    return content


def coefficient_lines(profile: CostProfile) -> list[str]:
    """The coefficients, one a line, in units that people read."""
    found = profile.coefficients
    rows = [
        ("a microbatch, whatever is in it (base)", f"{1e3 * found.base:.3f} ms"),
        ("the least on one rank (floor)", f"{1e3 * found.floor:.3f} ms"),
        ("the least on a group (floor_shared)", f"{1e3 * found.floor_shared:.3f} ms"),
        ("a token (token)", f"{1e6 * found.token:.4g} us"),
        ("a squared token (square)", f"{1e12 * found.square:.4g} ps"),
        *(
            [("the same where queries see many keys (long)", f"{1e12 * found.long.square:.4g} ps")]
            if found.long
            else []
        ),
        ("a hop of a group, per layer and direction (latency)", f"{1e6 * found.within.latency:.4g} us"),
        ("its effective bandwidth", f"{found.within.bandwidth / 1e9:.4g} GB/s"),
        ("share of attention that hides a hop (overlap)", f"{found.overlap:.2f}"),
    ]
    if profile.iteration is not None:
        rows.append(("an iteration beside its microbatches", f"{1e3 * profile.iteration.seconds:.3f} ms"))
        if profile.iteration.pace != 1:
            rows.append(("pace of iterations, in all of the above but floors", f"{profile.iteration.pace:.3f}"))
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {value}" for label, value in rows]


def sample_rows(profile: CostProfile, samples: Sequence[Sample]) -> list[tuple[str, ...]]:
    """One row for each kind of microbatch and CP size, under `COLUMNS`."""
    errors = relative_errors(samples, timed_apart(profile)) if samples else np.zeros(0)
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault((sample.kind, sample.size, sample.held_out), []).append(index)
    rows: list[tuple[str, ...]] = []
    for (kind, size, held), own in sorted(groups.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])):
        tokens = [samples[index].tokens for index in own]
        times = [1e3 * samples[index].seconds for index in own]
        off = errors[own]
        rows.append(
            (
                f"{kind}, held out" if held else kind,
                str(size),
                str(len(own)),
                f"{min(tokens):,.0f} to {max(tokens):,.0f}",
                f"{min(times):,.2f} to {max(times):,.2f}",
                f"{np.abs(off).mean():.1%}",
                f"{off[np.abs(off).argmax()]:+.1%}",
            )
        )
    return rows


def agreement_rows(agreements: Sequence[Agreement]) -> list[tuple[str, ...]]:
    """One row for each scheduler of each run, under `AGREEMENT_COLUMNS`."""
    return [
        (
            one.run,
            one.scheduler,
            str(one.iterations),
            f"{one.measured_ms:,.1f}",
            f"{one.predicted_ms:,.1f}",
            f"{one.predicted_ms / one.measured_ms - 1:+.1%}",
            f"{one.mape:.1%}",
        )
        for one in agreements
    ]


def verdict_lines(made: Calibrated, refitted: Refit | None = None) -> list[str]:
    """How well the profile predicts, where it lies, and whether it will be used."""
    profile = made.profile
    lines = []
    if profile.fit is not None and refitted is None:
        lines.append(
            f"Microbatches held out are predicted within {profile.fit.mape:.1%} on average, 95 % of them within "
            f"{profile.fit.p95:.1%}; those of the fit within {profile.fit.fitted_mape:.1%}."
        )
    if profile.iteration is not None and profile.iteration.mape is not None and refitted is None:
        lines.append(
            f"Of the {profile.iteration.iterations} iterations that followed, each is predicted by a fit to the others "
            f"within {profile.iteration.mape:.1%} on average."
        )
    if refitted is not None:
        lines.append(
            f"Iterations held out were predicted within {refitted.before:.1%} on average before, and within "
            f"{refitted.after:.1%} (95 % of them within {refitted.p95:.1%}) after the refit to {refitted.iterations}."
        )
    if made.picture is not None:
        lines.append(f"Picture: {made.picture}")
    lines.append("Nothing was written; --out keeps the profile." if made.file is None else f"Profile: {made.file}")
    if profile.refused:
        lines.append(f"NOT USABLE: {profile.refused}; nothing is predicted with this profile.")
    return lines
