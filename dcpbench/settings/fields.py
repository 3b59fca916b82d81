"""The fields of a spec by their dotted names, and the sentence for each way in which a value can be wrong."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dcpbench.redact import redact
from dcpbench.spec import Data, Spec

DATA_KINDS: dict[str, type[BaseModel]] = {
    model.model_fields["kind"].default: model for model in get_args(get_args(Data)[0])
}
"""The models of the `data` section by `data.kind`."""
DEFAULT_KIND: str = Spec().data.kind


@lru_cache(maxsize=16)
def spec_fields(kind: str = DEFAULT_KIND) -> Mapping[str, FieldInfo]:
    """Every settable field of a spec whose data are of that kind, `section.field` -> its description."""
    found: dict[str, FieldInfo] = {}
    for name, info in Spec.model_fields.items():
        section = DATA_KINDS[kind] if name == "data" else info.annotation
        found.update(_leaves(name, section, info))
    return types.MappingProxyType(found)


def _leaves(name: str, annotation: Any, info: FieldInfo) -> Iterator[tuple[str, FieldInfo]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for child, child_info in annotation.model_fields.items():
            yield from _leaves(f"{name}.{child}", child_info.annotation, child_info)
    else:
        yield name, info


def all_fields() -> Mapping[str, FieldInfo]:
    """The fields of every kind of data together; where kinds share a name, one of them."""
    return {name: info for kind in DATA_KINDS for name, info in spec_fields(kind).items()}


def kinds_with(name: str) -> list[str]:
    """The kinds of data that have a field of this dotted name."""
    return [kind for kind in DATA_KINDS if name in spec_fields(kind)]


def sections() -> set[str]:
    """Every dotted name that holds fields and is none itself: `model`, `cases`, `cases.dcp`, ..."""
    names = all_fields()
    return {name[:dot] for name in names for dot in range(len(name)) if name[dot] == "."}


def accepts(info: FieldInfo, *kinds: type) -> bool:
    """Whether the field's type is, apart from None, made of `kinds` only (`accepts(info, str, Path)`)."""
    return all(part in kinds for part in _parts(info.annotation) if part is not types.NoneType)


def _parts(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for choice in get_args(annotation) for part in _parts(choice)]
    return [annotation]


def is_path(info: FieldInfo) -> bool:
    """Whether the field names a file or a folder."""
    return Path in _parts(info.annotation)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid dotted name that the user most probably meant: the same last word first, then a similar one."""
    names = list(valid)
    section, _, leaf = name.rpartition(".")
    same = [candidate for candidate in names if candidate.rpartition(".")[2] == leaf]
    if same:
        return max(same, key=lambda candidate: SequenceMatcher(None, name, candidate).ratio())
    siblings = {
        candidate.rpartition(".")[2]: candidate for candidate in names if candidate.rpartition(".")[0] == section
    }
    anywhere = {candidate.rpartition(".")[2]: candidate for candidate in names}
    for pool, word in ((siblings, leaf), ({candidate: candidate for candidate in names}, name), (anywhere, leaf)):
        close = get_close_matches(word, pool, n=5)
        if close:
            return pool[max(close, key=lambda candidate: _likeness(word, candidate))]
    return None


def _likeness(word: str, candidate: str) -> tuple[float, int]:
    # `cpp` is as close to `pp` as to `cp`, but people get the beginning right
    same_start = next((n for n, (a, b) in enumerate(zip(word, candidate, strict=False)) if a != b), len(candidate))
    return SequenceMatcher(None, word, candidate).ratio(), same_start


def unknown(name: str, kind: str) -> str:
    """The sentence for a key that the spec does not have."""
    valid = spec_fields(kind)
    shown = redact(name)[:80]
    others = kinds_with(name)
    if others:
        return f"{name} is no field of data.kind {kind}; it belongs to {', '.join(others)}: set data.kind too"
    parts = name.split(".")
    section = next((".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in sections()), "")
    near = nearest(name, valid)
    if near:
        return f"{shown} is not a known key; the nearest valid one is {near}"
    known = sorted({key.removeprefix(f"{section}.").split(".")[0] for key in valid if key.startswith(section)})
    return f"{shown} is not a known key; {section or 'a spec'} has {', '.join(known)}"


def complaint(error: Mapping[str, Any]) -> str:
    """What a field must be, from one pydantic error. Never holds what the user wrote: it may be a secret."""
    context = error.get("ctx", {})
    kind = str(error["type"])
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(*(f"{value:g}" for value in context.values()))
    return _SENTENCES.get(kind, "has a value that cannot be used")


_BOUNDS = {
    "greater_than": "must be greater than {}",
    "greater_than_equal": "must be at least {}",
    "less_than": "must be less than {}",
    "less_than_equal": "must be at most {}",
    "string_too_short": "must have at least {} characters",
    "string_too_long": "must have at most {} characters",
}
_SENTENCES = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be a path; put it in quotes",
    "string_pattern_mismatch": "must begin with a letter or digit and hold only letters, digits, `.`, `_` and `-`",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "model_type": "must be a section of fields",
    "model_attributes_type": "must be a section of fields",
}


def leaves_of(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything below `value`, a nested mapping as `model_dump` gives it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value
