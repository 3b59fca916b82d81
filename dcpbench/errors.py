"""Every way dcpbench can stop, each with its exit code.

    DcpbenchError
    ├── UsageError            2    the command line or an input file is wrong
    │   ├── SpecError         2    a field of the spec (or of its environment, or of --set)
    │   ├── DataError         2    a data file, a tokenizer, a row
    │   └── LogError          2    a console log or a run folder that cannot be read
    ├── ScheduleError         6    a scheduler cannot serve this batch on this domain
    ├── PreflightError        6    refused before anything was launched
    ├── LaunchError           4    a launch ended with a failure
    │   └── LaunchTimeout   124    a launch ran past its time limit
    ├── RecordsError          5    iterations are missing, duplicate, non-finite or misaligned
    └── Interrupted         130    Ctrl-C or SIGTERM

The message of an exception is the sentence the user sees: what is wrong, where (field, file and
line, launch), and what to do. Gates that fail (exit 1) and inconclusive results (exit 3) are
results, not exceptions: see `verdict.py`.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, fixed by the product definition and listed in `dcpbench --help`."""

    PASSED = 0
    GATE_FAILED = 1
    USAGE = 2
    INCONCLUSIVE = 3
    LAUNCH_FAILED = 4
    RECORDS = 5
    PREFLIGHT = 6
    TIMEOUT = 124
    INTERRUPTED = 130


class DcpbenchError(Exception):
    """Base of every error a user may see; `exit_code` is the process exit status."""

    exit_code: ExitCode = ExitCode.USAGE


class UsageError(DcpbenchError):
    """The command line or an input file is wrong."""


class SpecError(UsageError):
    """A field of the spec is unknown, missing or has a value that cannot be used."""


class DataError(UsageError):
    """A data file, tokenizer or row cannot be used."""


class LogError(UsageError):
    """A console log or run folder cannot be read."""


class PreflightError(DcpbenchError):
    """Refused before anything was launched."""

    exit_code = ExitCode.PREFLIGHT


class ScheduleError(DcpbenchError):
    """A scheduler cannot serve this batch on this domain."""

    exit_code = ExitCode.PREFLIGHT


class LaunchError(DcpbenchError):
    """A launch ended with a failure."""

    exit_code = ExitCode.LAUNCH_FAILED


class LaunchTimeout(LaunchError):
    """A launch ran past its time limit and was stopped."""

    exit_code = ExitCode.TIMEOUT


class RecordsError(DcpbenchError):
    """Iterations are missing, duplicate, skipped, non-finite or misaligned."""

    exit_code = ExitCode.RECORDS


class Interrupted(DcpbenchError):
    """Stopped by Ctrl-C or SIGTERM; what was started has been ended."""

    exit_code = ExitCode.INTERRUPTED
