"""What a Megatron-LM checkout can do, read from its sources: nothing of it is imported or run.

Many of its flags are made from the fields of dataclasses, so each capability is looked for as an
option, a field or an attribute, in every file that may define it.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPT = "pretrain_gpt.py"
GIT_FOLDER = Path("megatron/core")
"""A package inside every checkout, from which git tells the state of the whole."""

_ARGUMENTS = ("megatron/training/arguments.py", "megatron/training/config")
_CONFIGS = ("megatron/core/model_parallel_config.py", "megatron/core/transformer/transformer_config.py", *_ARGUMENTS)
_SCHEDULERS = ("megatron/core/datasets/data_schedule.py",)
_HELPERS = Path("megatron/core/datasets")


@dataclass(frozen=True)
class Capability:
    """Something both cases, or the dcp case, cannot do without."""

    what: str
    word: str
    """What its sources must contain, `_` standing for `_` or `-`; in quotes: as a text."""
    places: tuple[str, ...]
    """Files, and folders whose Python files are meant, below the checkout."""


CAPABILITIES: tuple[Capability, ...] = (
    Capability("dynamic context parallelism", "dynamic_context_parallel", _CONFIGS),
    Capability("a smallest dynamic CP size", "min_dynamic_context_parallel_size", _CONFIGS),
    Capability("a capacity per rank", "max_seqlen_per_dp_cp_rank", _CONFIGS),
    Capability("the choice of a packing scheduler", "sequence_packing_scheduler", _CONFIGS),
    Capability("the scheduler of the baseline", '"dp_balanced"', _SCHEDULERS),
    Capability("the scheduler of the dcp case", '"default_dynamic_cp"', _SCHEDULERS),
    Capability("data of variable length", "use_varlen_dataset", _ARGUMENTS),
    Capability("mock data of chosen lengths", "varlen_mock_dataset_config_json", _ARGUMENTS),
)


def missing(checkout: Path) -> list[str]:
    """One sentence for each thing that the checkout lacks, naming the files that were looked into."""
    if not checkout.is_dir():
        return [f"megatron.checkout {checkout} is no folder; give the root of a Megatron-LM checkout"]
    entry = [name for name in (SCRIPT, "gpt_builders.py", "model_provider.py") if not (checkout / name).is_file()]
    if entry:
        return [
            f"megatron.checkout {checkout} has no {', no '.join(entry)}; give the root of a Megatron-LM checkout "
            "(the pip package megatron-core has no training script)"
        ]
    texts: dict[str, str] = {}
    found: list[str] = []
    for capability in CAPABILITIES:
        for place in capability.places:
            if place not in texts:
                texts[place] = "\n".join(_read(file) for file in _files(checkout / place))
        if not any(_pattern(capability.word).search(texts[place]) for place in capability.places):
            found.append(
                f"megatron.checkout {checkout} lacks {capability.what}: no {capability.word} in "
                f"{', '.join(capability.places)}; use branch dev, of August 2026 or later"
            )
    return found


def helpers_are_built(checkout: Path) -> bool:
    """Whether the compiled data-set helpers are there for this Python and newer than their source."""
    source = checkout / _HELPERS / "helpers.cpp"
    built = checkout / _HELPERS / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        return not source.is_file() or built.stat().st_mtime >= source.stat().st_mtime
    except OSError:
        return False


def helpers_folder(checkout: Path) -> Path:
    """Where the helpers are compiled to at every start that does not find them."""
    return checkout / _HELPERS


def _pattern(word: str) -> re.Pattern[str]:
    if word.startswith('"'):
        return re.compile(rf"[\"']{re.escape(word[1:-1])}[\"']")
    return re.compile(rf"(?<![A-Za-z0-9_]){word.replace('_', '[_-]')}(?![A-Za-z0-9_])")


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.rglob("*.py"))
    elif path.is_file():
        yield path


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
