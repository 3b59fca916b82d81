"""YAML and JSON text as settings: dotted names, plain values, the line of each. And back to YAML.

Scalars follow the YAML 1.2 core schema, not the 1.1 rules of most Python loaders: `1e-3` is a
number, `on` and `no` are text, `1:30` and `2026-01-01` are text, `010` is ten. JSON is read by
the same code. Duplicate keys are refused; anchors and merge keys (`<<`) work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from dcpbench.errors import SpecError
from dcpbench.redact import redact

_TAG = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("merge", r"<<$", "<"),
)
_EXPANSION_LIMIT = 100_000
"""Values that aliases may add to a file; more is a trap (a few lines can stand for 10^9 values)."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name and form that PyYAML reads


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        """Never write anchors: the file is read by people."""
        return True


for _name, _pattern, _first in _SCALARS:
    _characters = [character if character != "\0" else "" for character in _first]
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _characters)

_yaml_1_1 = yaml.resolver.Resolver()


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # `on` is plain text to us, but a boolean to a YAML 1.1 reader: quote what any of the two would misread.
    other = _yaml_1_1.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return dumper.represent_scalar(_TAG + "str", text, style=None if other == _TAG + "str" else "'")


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True)
class Leaf:
    """A value that is not a mapping, and the line (from 1) on which it stands."""

    value: Any
    line: int


def dump(value: Any) -> str:
    """`value` as YAML, keys in their order; reads back equal here and in YAML 1.1."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def value(text: str) -> Any:
    """The value of a text such as the right side of `--set`: a scalar, a list or a mapping.

    Raises:
        SpecError: the text is not YAML.
    """
    node = _compose(text, "value")
    return None if node is None else _Converter("value").plain(node)


def leaves(text: str, source: str) -> tuple[dict[str, Leaf], list[str]]:
    """Every value of a settings file by its dotted name, and a sentence for each duplicate or unusable key.

    `source` is the file's name for messages. A leading byte-order mark is no part of the text.

    Raises:
        SpecError: the text is not YAML or JSON, or its top level is not a mapping.
    """
    text = text.removeprefix("\ufeff")
    node = _compose(text, source)
    if node is None:
        return {}, []
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(
            f"{source}: the file holds {_what(node)} where settings `name: value` are needed; "
            "see the files in configs/ for the form"
        )
    converter = _Converter(source)
    found: dict[str, Leaf] = {}
    for name, leaf in converter.flat(node, ""):
        if name in found:
            converter.problems.append(f"{source} line {leaf.line}: {redact(name)} is set twice, first on line "
                                      f"{found[name].line}; keep one")  # fmt: skip
        else:
            found[name] = leaf
    return found, converter.problems


def _compose(text: str, source: str) -> yaml.Node | None:
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, which may not occur inside its strings
    try:
        return yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise SpecError(f"{source}: the values are nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise SpecError(f"{source}{line}: {_syntax(error)}") from None
    except yaml.reader.ReaderError as error:
        line = f" line {text.count(chr(10), 0, error.position) + 1}"
        raise SpecError(f"{source}{line}: a control character, which text files may not hold; remove it") from None
    except yaml.YAMLError:
        raise SpecError(f"{source}: this is not YAML") from None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "cannot be read"
    if "\\t" in problem:
        return "a tab where YAML needs spaces; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a second `: ` in one line; quote the value, or indent with care"
    if "single document" in str(error.context):
        return "a second document (`---`); a spec is one document"
    # What stands in quotes may come from the file, and so may be a secret: keep only YAML's own short words.
    shown = re.sub(r"'([^']*)'|\"([^\"]*)\"", lambda m: m[0] if re.fullmatch(r"<[a-z ]+>|.{1,2}", m[1] or "") else "…",
                   problem)  # fmt: skip
    return f"this is not YAML: {shown}"


def _what(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


class _Converter:
    """YAML nodes to plain values, with a bound on what aliases may expand to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []
        self._open: set[int] = set()
        self._seen: set[int] = set()
        self._repeated = 0

    def flat(self, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Leaf]]:
        """The dotted name and value of every leaf; an empty mapping is a leaf too, so that its name is checked."""
        for key, child in self._items(node):
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            if isinstance(child, yaml.MappingNode) and child.value:
                self._enter(child)
                yield from self.flat(child, name)
                self._open.discard(id(child))
            else:
                yield name, Leaf(self.plain(child), key.start_mark.line + 1)

    def plain(self, node: yaml.Node) -> Any:
        """The Python value of a node."""
        self._enter(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return {key.value: self.plain(child) for key, child in self._items(node)}
            if isinstance(node, yaml.SequenceNode):
                return [self.plain(child) for child in node.value]
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _enter(self, node: yaml.Node) -> None:
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise SpecError(f"{self.source} line {line}: an anchor that contains itself")
        self._open.add(id(node))
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > _EXPANSION_LIMIT:
            raise SpecError(f"{self.source} line {line}: aliases expand to more than {_EXPANSION_LIMIT} values")

    def _items(self, node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        own: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if key.tag == _TAG + "merge":
                for base in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                    if not isinstance(base, yaml.MappingNode):
                        raise SpecError(f"{self.source} line {line}: `<<` needs a mapping")
                    self._enter(base)
                    merged = {k.value: (k, v) for k, v in self._items(base)} | merged
                    self._open.discard(id(base))
            elif not isinstance(key, yaml.ScalarNode) or not key.value:
                self.problems.append(f"{self.source} line {line}: a key must be a name")
            elif key.value in own:
                first = own[key.value][0].start_mark.line + 1
                self.problems.append(
                    f"{self.source} line {line}: the key {redact(key.value)} appears twice, first on line {first}; "
                    "keep one"
                )
            else:
                own[key.value] = (key, child)
        return list((merged | own).values())

    def _scalar(self, node: yaml.Node) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int":
                # int(text, 0) would refuse leading zeros, which the core schema reads as decimal
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:  # a number too long for int(), or an explicit tag on something else
            return text
        if kind != "str":
            raise SpecError(f"{self.source} line {node.start_mark.line + 1}: a YAML tag that is not used in specs")
        if any("\ud800" <= character <= "\udfff" for character in text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON writes pairs of escapes
        return text
