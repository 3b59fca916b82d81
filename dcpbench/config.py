"""Settings in layers: built-in defaults < spec file < environment < `--set` and options.

Every value remembers where it came from. Relative paths are relative to the working directory and
a leading `~` is the home directory. An empty environment variable counts as not set.

Data: `DATASET_PATH` makes the data real text (`.csv`: lengths), whatever kind the spec file has.
Fields of the file's kind that the new kind lacks fall away, likewise when `--set data.kind=...`
changes the kind. `TOKENIZER_MODEL` is an error where the data are not text: it would have no effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dcpbench.errors import SpecError
from dcpbench.redact import learn, redact, redact_value
from dcpbench.settings import fields, yamltext
from dcpbench.settings.resources import spec_file
from dcpbench.spec import Spec

ENVIRONMENT: dict[str, str] = {
    "DATASET_PATH": "data.path",
    "TOKENIZER_MODEL": "data.tokenizer",
    "LOAD_PATH": "training.load_path",
    "GPUS_PER_NODE": "topology.gpus_per_node",
    "TP_SIZE": "topology.tp",
    "CP_SIZE": "topology.cp",
    "PP_SIZE": "topology.pp",
    "MAX_SEQLEN_PER_DP_CP_RANK": "cases.max_seqlen_per_dp_cp_rank",
    "MIN_DYNAMIC_CONTEXT_PARALLEL_SIZE": "cases.min_dynamic_context_parallel_size",
    "TRAIN_ITERS": "training.iterations",
    "WARMUP_ITERS": "training.warmup_iterations",
    "GLOBAL_BATCH_SIZE": "training.global_batch_size",
    "CASE_ORDER": "launches.order",
    "LOSS_ATOL": "tolerances.loss_atol",
    "LOSS_RTOL": "tolerances.loss_rtol",
    "CHECK_LOSS_PARITY": "tolerances.check_loss_parity",
    "OUTPUT_DIR": "output.dir",
}
"""Environment names that set a field of the spec."""

SWITCHES: dict[str, str] = {
    "ANALYZE_ONLY": "1: `analyze` leaves the manifest as it is",
    "DCPBENCH_DEBUG": "1: show the traceback of an error",
}
"""Environment names that are no part of the spec; no other `DCPBENCH_*` name is accepted."""


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec and, for every field by its dotted name, where its value came from.

    A source is `default`, `file NAME`, `environment NAME`, `--set` or the name of an option.
    """

    spec: Spec
    sources: dict[str, str]


@dataclass(frozen=True)
class _Entry:
    value: Any
    source: str
    where: str
    layer: int


def load(
    path: Path | None,
    *,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> ResolvedSpec:
    """The spec of a file (YAML or JSON) with the environment, `a.b=value` overrides and options applied.

    `path` may also name a spec that comes with dcpbench (`quick_4xcpu`, `configs/quick_4xcpu.yaml`);
    `options` are command-line options with a name of their own: dotted field -> (option, value).

    Raises:
        SpecError: one sentence for each thing that is wrong, naming field, file and line or other origin,
            and what is allowed. Values are never shown: they may be secrets.
    """
    problems: list[str] = []
    entries: dict[str, _Entry] = {}
    path = spec_file(path) if path else None
    for layer, found in enumerate(
        (
            _from_file(path, problems) if path else {},
            _from_environment(environ, problems),
            _from_overrides(overrides, problems) | _from_options(options or {}),
        )
    ):
        if layer == 1:
            found = _with_dataset_kind(found, entries)  # noqa: PLW2901 - the environment's path decides the kind
        for name, (value, source, where) in found.items():
            _put(entries, name, _Entry(value, source, where, layer))
    kind = _settle_kind(entries, problems)
    _drop_unknown(entries, kind, problems)
    spec = _validate(entries, kind, path, problems)
    if spec is None:
        raise SpecError(_join(problems))
    return ResolvedSpec(spec, {name: entries[name].source if name in entries else "default" for name in _names(spec)})


def write_yaml(spec: Spec) -> str:
    """The resolved spec as the text of `spec.yaml`; `load` reads it back equal. Secrets are left out."""
    data = redact_value(spec.model_dump(mode="json"), identity=False)
    return "# Every setting of this run, as resolved; `dcpbench run` accepts this file.\n" + yamltext.dump(data)


# Layers: dotted name -> (value, source, where it stands for messages)
_Layer = dict[str, tuple[Any, str, str]]


def _from_file(path: Path, problems: list[str]) -> _Layer:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path} line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{path}: the spec file cannot be read: {error.strerror}") from None
    learn(text)
    leaves, duplicates = yamltext.leaves(text, path.name)
    problems.extend(duplicates)
    return {
        name: (leaf.value, f"file {path.name}", f"{path.name} line {leaf.line}")
        for name, leaf in leaves.items()
        # a section whose fields are all commented out
        if not (name in fields.sections() and leaf.value in (None, {}))
    }


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> _Layer:
    valid = {*ENVIRONMENT, *SWITCHES}
    for name in environ:
        if name.startswith("DCPBENCH_") and name not in SWITCHES:
            plain = name.removeprefix("DCPBENCH_")
            near = plain if plain in valid else (get_close_matches(name, valid, 1, 0.6) or ["DCPBENCH_DEBUG"])[0]
            problems.append(f"environment variable {name} is not known; the nearest valid one is {near}")
    return {
        field: (environ[name].strip(), f"environment {name}", f"environment variable {name}")
        for name, field in ENVIRONMENT.items()
        if environ.get(name, "").strip()
    }


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> _Layer:
    layer: _Layer = {}
    known = fields.all_fields()
    for text in overrides:
        learn(text)
        name, equals, right = text.partition("=")
        name = name.strip()
        if not equals or not name:
            problems.append("--set needs `section.field=value`, for example --set topology.cp=2")
            continue
        where = f"--set {redact(name)[:80]}"
        try:
            value = yamltext.value(right)
        except SpecError as error:
            problems.append(f"{where}: {str(error).removeprefix('value').lstrip(': ')}")
            continue
        if name in known and fields.accepts(known[name], str, Path) and not isinstance(value, str | None):
            value = right.strip()  # a path or name that looks like a number
        if isinstance(value, dict) and name in fields.sections():
            layer.update({leaf: (item, "--set", where) for leaf, item in fields.leaves_of(name, value)})
        else:
            layer[name] = (value, "--set", where)
    return layer


def _from_options(options: Mapping[str, tuple[str, Any]]) -> _Layer:
    return {name: (value, option, option) for name, (option, value) in options.items()}


def _with_dataset_kind(layer: _Layer, below: Mapping[str, _Entry]) -> _Layer:
    if "data.path" not in layer:
        return layer
    path, source, where = layer["data.path"]
    current = below["data.kind"].value if "data.kind" in below else fields.DEFAULT_KIND
    wanted = "csv" if path.lower().endswith(".csv") else "text"
    return layer if current == wanted else {"data.kind": (wanted, source, where), **layer}


def _put(entries: dict[str, _Entry], name: str, entry: _Entry) -> None:
    """Set a value; a section's value replaces its fields and a field replaces its section's value."""
    for other in [key for key in entries if key.startswith(f"{name}.") or name.startswith(f"{key}.")]:
        del entries[other]
    entries[name] = entry


def _settle_kind(entries: dict[str, _Entry], problems: list[str]) -> str:
    """The kind of the data, after the fields that only an overridden kind has are gone."""
    entry = entries.get("data.kind")
    kind = entry.value if entry else fields.DEFAULT_KIND
    if entry and (not isinstance(kind, str) or kind not in fields.DATA_KINDS):
        problems.append(f"{entry.where}: data.kind must be {_choices(fields.DATA_KINDS)}")
        for name in [name for name in entries if name.startswith("data.")]:
            del entries[name]
        return fields.DEFAULT_KIND
    if entry:
        for name, other in list(entries.items()):
            if other.layer < entry.layer and name not in fields.spec_fields(kind) and fields.kinds_with(name):
                del entries[name]
    return str(kind)


def _choices(names: Mapping[str, Any]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def _drop_unknown(entries: dict[str, _Entry], kind: str, problems: list[str]) -> None:
    valid = fields.spec_fields(kind)
    sections = fields.sections()
    reported: set[str] = set()
    for name, entry in list(entries.items()):
        if name in valid:
            continue
        del entries[name]
        top = name.partition(".")[0]
        if entry.source == "environment TOKENIZER_MODEL":
            message = f"data.kind {kind} has no tokenizer; unset it, or set DATASET_PATH or data.kind=text"
        elif name in sections:
            known = sorted({key.removeprefix(f"{name}.").split(".")[0] for key in valid if key.startswith(f"{name}.")})
            message = f"{name} is a section; give its fields: {', '.join(known)}"
        elif top != name and top not in sections and top not in valid and top in reported:
            continue
        else:
            message = fields.unknown(name, kind)
        reported.add(top)
        problems.append(f"{entry.where}: {message}")


def _validate(entries: Mapping[str, _Entry], kind: str, path: Path | None, problems: list[str]) -> Spec | None:
    valid = fields.spec_fields(kind)
    tree: dict[str, Any] = {"data": {"kind": kind}}
    for name, entry in entries.items():
        value = entry.value
        if fields.is_path(valid[name]) or name == "data.tokenizer":
            value = os.path.expanduser(value) if isinstance(value, str) else value
        elif _wrong_boolean(value) and not fields.accepts(valid[name], bool):
            problems.append(f"{entry.where}: {name} must not be true or false")
            continue
        node = tree
        *above, last = name.split(".")
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    try:
        spec = Spec.model_validate(tree)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            problems.append(_sentence(item, entries, kind, path))
        return None
    problems.extend(_unknown_schedulers(spec, entries))
    return None if problems else spec


def _unknown_schedulers(spec: Spec, entries: Mapping[str, _Entry]) -> list[str]:
    from dcpbench.dcp.schedulers import SCHEDULERS  # noqa: PLC0415 - the only part of dcp that a spec needs

    found: list[str] = []
    for name, case in (("baseline", spec.cases.baseline), ("dcp", spec.cases.dcp)):
        if case.scheduler not in SCHEDULERS:
            field = f"cases.{name}.scheduler"
            found.append(f"{entries[field].where}: {field} must be {_choices(SCHEDULERS)}")
    return found


def _wrong_boolean(value: Any) -> bool:
    # pydantic reads true as 1 where a number is wanted
    return isinstance(value, bool) or (isinstance(value, list) and any(isinstance(item, bool) for item in value))


def _sentence(error: Mapping[str, Any], entries: Mapping[str, _Entry], kind: str, path: Path | None) -> str:
    parts = [
        part
        for index, part in enumerate(error["loc"])
        if not (index == 1 and error["loc"][0] == "data" and part == kind)
    ]
    name = ".".join(str(part) for part in parts if isinstance(part, str))
    place = "".join(f"[{part}]" for part in parts if isinstance(part, int))
    complaint = fields.complaint(error)
    if error["type"] == "value_error":
        # A rule over several fields: say where those that it names came from.
        words = complaint.lower().replace(";", " ").replace(",", " ").split()
        named = [key for key in entries if key.startswith(f"{name}.") and key.rpartition(".")[2] in words]
        origins = ", ".join(f"{key} from {entries[key].where}" for key in named)
        return f"{name or (path.name if path else 'spec')}: {complaint}" + (f" ({origins})" if origins else "")
    where = entries[name].where if name in entries else path.name if path else "spec"
    return f"{where}: {name}{place} {complaint}"


def _names(spec: Spec) -> list[str]:
    return list(fields.spec_fields(spec.data.kind))


def _join(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} settings are wrong:\n" + "\n".join(f"  {problem}" for problem in unique)
