"""Where the files that come with dcpbench lie: `configs/` and `runners/`.

In a checkout, also an editable install, they stand beside the package; in a wheel they are inside
it, as `dcpbench/configs` and `dcpbench/runners` (see `pyproject.toml`).
"""

from __future__ import annotations

from pathlib import Path

from dcpbench.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str, package: Path = PACKAGE) -> Path:
    """The folder `configs` or `runners`.

    Raises:
        UsageError: this installation does not have it.
    """
    inside, beside = package / name, package.parent / name
    if inside.is_dir():
        return inside
    # Beside a package in site-packages, a folder of that name would be somebody else's.
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise UsageError(f"this installation of dcpbench has no {name}/ folder; install it again, or run from a checkout")


def configs() -> list[Path]:
    """The spec files that come with dcpbench, by name."""
    return sorted(folder("configs").glob("*.yaml"))


def spec_file(path: Path) -> Path:
    """`path` if it is there; else the shipped spec that `NAME`, `NAME.yaml` or `configs/NAME.yaml` means.

    So `dcpbench run configs/quick_4xcpu.yaml` works in any folder. A path that means nothing is
    returned as it is, for the reader to refuse.
    """
    if path.exists() or path.parent not in (Path(), Path("configs")):
        return path
    try:
        shipped = folder("configs") / (path.name if path.suffix else f"{path.name}.yaml")
    except UsageError:
        return path
    return shipped if shipped.is_file() else path
