"""What may be written down: an allow-list for the environment, and a secret scan for everything else.

Every writer of dcpbench calls `redact` (text) or `redact_value` (nested data) on what did not
originate in dcpbench itself. A *rule* yields the parts of a text that must go; `redact` replaces
them and `scan` only names them, so what one removes is exactly what the other finds. Redaction
prefers to remove too much: a report without a word is better than a report with a password.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dcpbench.provenance.secretscan import MARK, SECRET_RULES, Span, disjoint, is_secret_name, learn

__all__ = [
    "MARK",
    "Finding",
    "LineRedactor",
    "allowed_environment",
    "is_allowed_name",
    "is_secret_name",
    "learn",
    "redact",
    "redact_value",
    "scan",
]

ALLOWED_PREFIXES = (
    "NVTE_",
    "NCCL_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "CUBLASLT_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "GLOO_",
    "TRITON_",
    "DCPBENCH_",
)
ALLOWED_NAMES = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "PYTHONHASHSEED"}
)


@dataclass(frozen=True)
class Finding:
    """Something that should not have been written: what kind, and on which line (from 1). Never the thing itself."""

    kind: str
    line: int


def is_allowed_name(name: str) -> bool:
    """Whether an environment variable of this name may be written down, and passed on to workers."""
    return (name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES)) and not is_secret_name(name)


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that may be written down, sorted; paths in them lose the home directory.

    A variable is left out unless its family is on the list, and also when its name or its value
    looks like a secret.
    """
    return {
        name: redact(environ[name])
        for name in sorted(environ)
        if is_allowed_name(name) and not scan(environ[name], identity=False)
    }


def redact(text: str, *, identity: bool = True) -> str:
    """`text` without secrets and, unless `identity` is false, without home directory, user and host name.

    Applying it again changes nothing. URLs keep scheme, host and path; names of variables and
    options stay, their values become `[redacted]`.
    """
    rules = SECRET_RULES + _IDENTITY_RULES if identity else SECRET_RULES
    for _ in range(4):
        # What one rule leaves may be a match of another (a URL inside an option), so repeat until nothing changes.
        before = text
        for rule in rules:
            text = _apply(text, list(rule(text)))
        if text == before:
            break
    return text


def redact_value(value: Any, *, identity: bool = True) -> Any:
    """`value` (mappings, sequences, text, paths, numbers) redacted throughout; tuples become lists, paths text.

    The value of a secret-named key is replaced whole, and so is the argument after a secret
    option in a list. Numbers stay numbers.
    """
    if isinstance(value, str):
        return redact(value, identity=identity)
    if isinstance(value, os.PathLike):
        return redact(os.fspath(value), identity=identity)
    if isinstance(value, Mapping):
        return {
            # Keys are the words of a schema: secrets may hide in them, user names do not.
            redact(str(key), identity=False): _blank(item)
            if is_secret_name(str(key))
            else redact_value(item, identity=identity)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else list(value)
        result: list[Any] = []
        for index, item in enumerate(items):
            before = items[index - 1] if index else None
            secret = isinstance(before, str) and before.startswith("-") and "=" not in before and is_secret_name(before)
            if secret and isinstance(item, str) and not item.startswith("--"):
                result.append(MARK)
            else:
                result.append(redact_value(item, identity=identity))
        return result
    return value


def _blank(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_blank(item) for item in value]
    if isinstance(value, (str, bytes, os.PathLike)) and value not in ("", b""):
        return MARK
    return value


def scan(text: str, *, identity: bool = True) -> list[Finding]:
    """Everything `redact` would remove from `text`, in order of lines."""
    rules = SECRET_RULES + _IDENTITY_RULES if identity else SECRET_RULES
    spans = [span for rule in rules for span in rule(text) if text[span.start : span.end] != span.replacement]
    if not spans:
        return []
    ends = [match.start() for match in re.finditer("\n", text)]
    found = {(bisect_left(ends, span.start) + 1, span.kind) for span in spans}
    return [Finding(kind, line) for line, kind in sorted(found)]


class LineRedactor:
    """`redact` for a stream of lines: a private key that is printed over several lines disappears too."""

    def __init__(self) -> None:
        self._inside = False

    def __call__(self, line: str) -> str:
        """The line as it may be written; the body of a private key becomes empty lines."""
        end = "\n" if line.endswith("\n") else ""
        if self._inside and _KEY_BODY.match(line):
            self._inside = "-----END" not in line
            return end
        begin = line.find("-----BEGIN")
        self._inside = begin >= 0 and "PRIVATE KEY" in line[begin:] and "-----END" not in line[begin:]
        return redact(line[:begin]) + MARK + end if self._inside else redact(line)


_KEY_BODY = re.compile(r"(?:\[\w:]+\]:? ?)?[A-Za-z0-9+/=:, -]{0,200}\s*$")


_COMMON_NAMES = """
    root admin administrator user users test tests runner nobody ubuntu debian centos fedora docker jovyan vscode
    codespace coder dev git data model models config node host hostname server local localhost localdomain vm gpu cpu
    cuda train training worker home main master default python build service system daemon loss mean median seed tokens
    case pair launch run baseline iteration iterations batch name spec time seconds memory padding rank ranks grace max
    min total order device attention scheduler capacity topology launches digest kind
"""
_ORDINARY = frozenset(_COMMON_NAMES.split())


def _homes(text: str) -> Iterator[Span]:
    for match in _home_pattern(os.environ.get("HOME", "")).finditer(text):
        other = match["other"]
        yield Span(match.start(), match.end(), f"{other}[user]" if other else "~", "home directory")


@lru_cache(maxsize=16)
def _home_pattern(home: str) -> re.Pattern[str]:
    own = home.rstrip("/")
    first = rf"{re.escape(own)}(?![\w.-])|" if own.count("/") > 1 else ""
    return re.compile(
        rf"{first}(?:(?<![\w.~/-])|(?<=://))/root(?![\w.-])"
        r"|(?P<other>/home/|/Users/)(?:\[user\]|[^\s/\"'\\:,;)\]}<>|]+)"
    )


def _names(text: str) -> Iterator[Span]:
    for kind, mark, pattern in _name_patterns(*_identity()):
        for match in pattern.finditer(text):
            yield Span(match.start(), match.end(), mark, kind)


def _identity() -> tuple[frozenset[str], frozenset[str]]:
    users = {os.environ.get("LOGNAME", ""), os.environ.get("USER", ""), _account()}
    hosts = {os.environ.get("HOSTNAME", ""), socket.gethostname()}
    return frozenset(users), frozenset(hosts | {host.partition(".")[0] for host in hosts})


@lru_cache(maxsize=1)
def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a numeric user without an entry, as in many containers
        return ""


@lru_cache(maxsize=16)
def _name_patterns(users: frozenset[str], hosts: frozenset[str]) -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    found = (("host name", "[host]", _name_pattern(hosts)), ("user name", "[user]", _name_pattern(users)))
    return tuple((kind, mark, pattern) for kind, mark, pattern in found if pattern is not None)


def _name_pattern(names: frozenset[str]) -> re.Pattern[str] | None:
    """Names that are unlike a word go everywhere, short plain ones (`ann`, `mark`) only where they are names.

    `root`, `vm` or `model` are words of ordinary output, and as names they tell nobody anything.
    """
    bodies: list[str] = []
    for name in sorted(names, key=lambda n: (-len(n), n)):
        if not name or name.lower() in _ORDINARY:
            continue
        body = re.escape(name)
        if len(name) > 4 or (len(name) > 2 and not name.isalpha()):
            bodies.append(rf"(?<![A-Za-z0-9]){body}(?![A-Za-z0-9])")
        else:
            bodies.append(rf"(?<=[/@]){body}(?![A-Za-z0-9])|(?<![A-Za-z0-9]){body}(?=@)")
    return re.compile("|".join(bodies), re.IGNORECASE) if bodies else None


_IDENTITY_RULES: tuple[Callable[[str], Iterator[Span]], ...] = (_homes, _names)


def _apply(text: str, spans: list[Span]) -> str:
    if not spans:
        return text
    parts: list[str] = []
    position = 0
    for span in disjoint(spans):
        parts.extend((text[position : span.start], span.replacement))
        position = span.end
    return "".join((*parts, text[position:]))
