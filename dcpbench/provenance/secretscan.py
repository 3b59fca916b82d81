"""Where the secrets are in a text: known forms, URLs with credentials, values of secret names.

Each rule yields the spans that must go, in order and without overlap; `redact.py` removes them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote

MARK = "[redacted]"


@dataclass(frozen=True)
class Shape:
    """A secret that is known by its form: `hints`, one of which every match holds (lower case), and the pattern.

    Searching for the hints first makes a text without secrets cheap. The pattern's first group, if
    there is one, is the secret itself.
    """

    hints: tuple[str, ...]
    pattern: re.Pattern[str]


def _shape(hints: str, pattern: str) -> Shape:
    return Shape(tuple(hints.split()), re.compile(pattern))


_START = r"(?<![A-Za-z0-9])"
_KEY = r"-----{} [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
SHAPES: dict[str, Shape] = {
    "Hugging Face token": _shape("hf_ api_org_", _START + r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    "GitHub token": _shape("gh github_pat_", _START + r"(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"),
    "GitLab token": _shape("gl", _START + r"gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent)-[\w-]{16,}"),
    "sk- key": _shape("sk- k_live_ k_test_", _START + r"(?:sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{10,})"),
    "AWS access key": _shape("akia asia abia acca", _START + r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    "Slack token": _shape("xox xapp-", _START + r"(?:xox[a-z]|xapp)-[A-Za-z0-9-]{10,}"),
    "Slack webhook": _shape("hooks.slack.com", r"hooks\.slack\.com/((?:services|workflows|triggers)/[\w/-]{10,})"),
    "Google key": _shape("aiza ya29 gocspx-", _START + r"(?:AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})"),
    "NVIDIA key": _shape("nvapi-", _START + r"nvapi-[\w-]{20,}"),
    "PyPI token": _shape("pypi-", _START + r"pypi-[\w-]{40,}"),
    "npm token": _shape("npm_", _START + r"npm_[A-Za-z0-9]{30,}"),
    "W&B key": _shape("wandb_v", _START + r"wandb_v\d_\w{20,}"),
    # Forty hexadecimal digits are also a git commit, so this form needs its word before it.
    "old W&B key": _shape("wandb", r"(?i)wandb[^\n]{0,60}?(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])"),
    "JSON web token": _shape("eyj", _START + r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w.-]{8,}"),
    "bearer token": _shape("bearer", r"(?i)\bbearer[ \t]+(?=[^\s\d]*\d)([\w.~+/=-]{16,})"),
    "authorization header": _shape(
        "authorization",
        r"(?i)\bauthorization(?:\\*[\"'])?[ \t]*[:=][ \t]*(?:\\*[\"'])?"
        r"(?:(?:bearer|basic|token|digest|negotiate)[ \t]+)?([^\s\"'\\]+)",
    ),
    "curl credential": _shape("-u --user", r"(?<![\w-])(?:-u|--user)(?:[ \t]+|=)[\"']?[^\s:\"'=]+:([^\s\"']+)"),
    "netrc password": _shape("password", r"(?i)\blogin\s+\S+\s+password\s+(\S+)"),
    "private key": _shape(
        "private key",
        _KEY.format("BEGIN") + r"(?:[\s\S]*?" + _KEY.format("END") + r"|(?:[A-Za-z0-9+/=\s:,-]|\\[nr])*)",
    ),
}
"""To add a form is to add one line here, and its planted example in the test."""

_STRONG = r"secrets?|passwords?|passwd|passphrase|credentials?|api_?keys?|access_?keys?|private_?keys?|account_?keys?"
_WEAK = r"token|pwd|pat|cookie|bearer|authorization|auth|jwt|signature|sas|sig|webhook|(?<=[a-z0-9]_)key"
_STRONG_NAME = re.compile(rf"(?:^|_)(?:{_STRONG})(?:_|$)")
_WEAK_NAME = re.compile(rf"(?:^|_)(?:{_WEAK})$")
_PLAIN_NAME = re.compile(r"(?:^|_)(?:per|pad|eos|bos|unk|sep|cls|mask|next|first|last|special|added|end|start)_token$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_HINT = r"(?:secret|pass|pwd|credential|key|token|pat|cookie|bearer|auth|jwt|sig|sas|webhook)[\w.-]{0,40}"
_NAME_HINT = re.compile(rf"(?i){_HINT}(?:\\*[\"'])?[ \t]*[:=]")
_OPTION_HINT = re.compile(rf"(?i){_HINT}(?:\\*[\"'])?[, \t\n]")
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]{1,200})(?:\\*[\"'])?[ \t]*(?:=>|:=|={1,2}|:)[ \t]*")
_OPTION = re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w.-]{0,200})(?:\\*[\"'])?(?:,[ \t\n]*|[ \t\n]+)")
_QUOTED = re.compile(r"(?P<q>[\"'])(?P<value>(?:\\[\s\S]|(?!(?P=q))[^\\\n])*)(?P=q)")
_ESCAPED = re.compile(r"(?P<q>\\+[\"'])(?P<value>(?:(?!(?P=q))[^\n])*)(?P=q)")
_BARE = re.compile(r"(?P<value>(?:\\(?![\"'])|[^\s&\"'\\])+)")
_NUMBER = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?$")
_CLOSERS = ",;|)]}"
_NOTHING = frozenset({"", "null", "none", "true", "false", "str", "int"})

_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{1,30}:/{1,3}"  # one slash is left of a URL that was read as a path
    r"(?P<user>[^\s/?#\"'<>\\]{1,2000}(?=@)|[^\s/:@\[\"'<>\\]{1,200}:(?!\d+/)[^\s@\"'<>\\]{1,500}(?=@))@"
)


@dataclass(frozen=True)
class Span:
    """A part of a text that must go, and what takes its place."""

    start: int
    end: int
    replacement: str
    kind: str


_learned: set[str] = set()
_SHORTEST = 8
"""Shorter values of secret-named variables are not searched for: `TOKEN=no` must not blank every `no`."""


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret (`HF_TOKEN`, `--api-key`, `dbPassword`)."""
    return _strength(name) > 0


@lru_cache(maxsize=4096)
def _strength(name: str) -> int:
    """0: an ordinary name; 1: holds a secret unless its value is a number (`token`, `x_key`); 2: holds a secret."""
    words = re.sub(r"[^a-z0-9]+", "_", _CAMEL.sub("_", name).lower()).strip("_")
    if _STRONG_NAME.search(words):
        return 2
    return int(bool(_WEAK_NAME.search(words)) and not _PLAIN_NAME.search(words))


def kinds_in_bytes(data: bytes) -> set[str]:
    """What a file that is no text holds of secrets that are certain: known forms, URLs, values of variables."""
    text = data.decode("latin-1")
    return {span.kind for rule in (_shapes, _url_credentials, _known_values) for span in rule(text)}


def learn(text: str) -> None:
    """Remember the secrets in `text` (an option, a URL, a spec file), to remove them wherever they turn up alone.

    Only what is certain is remembered: credentials in URLs, values of secret options, known shapes.
    """
    for span in _url_credentials(text):
        user = text[span.start : span.end - 1]
        _learned.update(_forms(user), _forms(user.partition(":")[2]))
    for span in (*_options(text), *_shapes(text)):
        _learned.update(_forms(text[span.start : span.end]))


def _shapes(text: str) -> Iterator[Span]:
    lower = text.lower()
    spans = [
        Span(*match.span(1 if shape.pattern.groups else 0), MARK, kind)
        for kind, shape in SHAPES.items()
        if any(hint in lower for hint in shape.hints)
        for match in shape.pattern.finditer(text)
    ]
    yield from disjoint(spans)


def _url_credentials(text: str) -> Iterator[Span]:
    for match in _URL.finditer(text):
        user = match["user"]
        if user != "git":  # git@host is how everybody writes an SSH remote, not a secret
            yield Span(match.start("user"), match.end(), "", "credential in a URL")


def _assignments(text: str) -> Iterator[Span]:
    if _NAME_HINT.search(text):
        yield from _values(text, _NAME, "value of a secret name")


def _options(text: str) -> Iterator[Span]:
    if "-" in text and _OPTION_HINT.search(text):
        yield from _values(text, _OPTION, "value of a secret option")


def _values(text: str, names: re.Pattern[str], kind: str) -> Iterator[Span]:
    reached = 0
    for match in names.finditer(text):
        strength = _strength(match["name"])
        if match.start() < reached or not strength or match["name"].lower() == "authorization":  # has its own form
            continue
        value = _ESCAPED.match(text, match.end()) or _QUOTED.match(text, match.end()) or _BARE.match(text, match.end())
        if value is None or (names is _OPTION and value["value"].startswith("--")):
            continue
        if value["value"].startswith(MARK) and not value["value"][len(MARK) :].strip(_CLOSERS):
            continue
        core = value["value"].rstrip(_CLOSERS)
        if core.lower() in _NOTHING or (strength == 1 and _NUMBER.match(core)):
            continue
        reached = value.end("value")
        yield Span(value.start("value"), reached, MARK, kind)


def _known_values(text: str) -> Iterator[Span]:
    secrets = _environment_secrets() | _learned
    spans = []
    for secret in secrets:
        start = text.find(secret)
        while start >= 0:
            spans.append(Span(start, start + len(secret), MARK, "value of a secret variable"))
            start = text.find(secret, start + len(secret))
    yield from disjoint(spans)


def _environment_secrets() -> set[str]:
    found: set[str] = set()
    for name, value in os.environ.items():
        if is_secret_name(name) and name != "PWD":  # every shell sets PWD: the working directory, no password
            found.update(_forms(value))
        elif "@" in value:
            for span in _url_credentials(value):
                found.update(_forms(value[span.start : span.end - 1].partition(":")[2]))
    return found


@lru_cache(maxsize=1024)
def _forms(secret: str) -> tuple[str, ...]:
    """A secret as it may appear: as it is, in a URL, in a JSON string, line by line."""
    lines = [line for line in secret.splitlines() if len(line) >= 16] if "\n" in secret else []
    forms = {secret, secret.strip(), quote(secret, safe=""), json.dumps(secret)[1:-1], *lines}
    return tuple(form for form in forms if len(form) >= _SHORTEST and form != MARK and form not in MARK)


def disjoint(spans: Iterable[Span]) -> list[Span]:
    """Spans in order; those that overlap are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if joined and span.start < joined[-1].end:
            last = joined[-1]
            joined[-1] = Span(last.start, max(last.end, span.end), last.replacement, last.kind)
        else:
            joined.append(span)
    return joined


SECRET_RULES: tuple[Callable[[str], Iterator[Span]], ...] = (
    _url_credentials,
    _known_values,
    _shapes,
    _options,
    _assignments,
)
"""Applied in this order: a URL loses its credentials before the option that holds it is looked at."""
