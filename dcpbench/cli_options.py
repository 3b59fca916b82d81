"""The options that commands share, as types with their help texts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dcpbench.errors import DcpbenchError


class Order(StrEnum):
    """Values of `--order`."""

    balanced = "balanced"
    baseline_first = "baseline_first"
    dcp_first = "dcp_first"


class Format(StrEnum):
    """Values of `--format`."""

    auto = "auto"
    native = "native"
    megatron = "megatron"


class Shown(StrEnum):
    """Values of `--format` of `report`."""

    text = "text"
    markdown = "markdown"
    html = "html"
    csv = "csv"
    json = "json"
    junit = "junit"
    github = "github"
    summary = "summary"


class IntervalKind(StrEnum):
    """Values of `--interval`."""

    t = "t"
    hierarchical = "hierarchical"


class Compared(StrEnum):
    """Values of `--format` of `compare`."""

    text = "text"
    junit = "junit"
    github = "github"
    summary = "summary"


def complete_spec(incomplete: str) -> list[str]:
    """Names of shipped specs that begin like this."""
    from dcpbench.settings import resources  # noqa: PLC0415 - only where the shell asks

    try:
        names = [path.stem for path in resources.configs()]
    except DcpbenchError:
        names = []
    return [name for name in names if name.startswith(incomplete)]


SpecFile = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC", help="A spec file (YAML), or the name of one that is shipped.", autocompletion=complete_spec
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Overrides = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Set a field of the spec; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (or DCPBENCH_DEBUG=1).")]
Atol = Annotated[
    float | None, typer.Option("--loss-atol", envvar="LOSS_ATOL", show_envvar=True, help="Absolute loss tolerance.")
]
Rtol = Annotated[
    float | None, typer.Option("--loss-rtol", envvar="LOSS_RTOL", show_envvar=True, help="Relative loss tolerance.")
]
CheckParity = Annotated[
    bool | None,
    typer.Option(
        "--check-loss-parity/--no-check-loss-parity",
        envvar="CHECK_LOSS_PARITY",
        show_envvar=True,
        help="Whether a finite loss out of tolerance fails.",
    ),
]
MinSpeedup = Annotated[
    float | None,
    typer.Option(
        "--min-speedup", metavar="X", help="Fail unless the lower end of the 95 % interval of the speed-up reaches X."
    ),
]
IntervalOption = Annotated[
    IntervalKind | None,
    typer.Option("--interval", help="How the interval of the speed-up is made; hierarchical needs 10 pairs."),
]
Decide = Annotated[
    bool, typer.Option("--decide", help="End with exit code 3 unless it is decided which case is faster, or neither.")
]
AnalyzeOnly = Annotated[
    bool, typer.Option("--analyze-only", envvar="ANALYZE_ONLY", show_envvar=True, help="Leave the manifest as it is.")
]
