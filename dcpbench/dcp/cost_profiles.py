"""Cost profiles: the coefficients of the cost model for one GPU and one model, where they come from, where they lie.

A profile is a JSON file, one `CostProfile`. `dcpbench calibrate` writes measured ones, into the user's folder unless
told otherwise; assumed ones come with dcpbench. `resolve` turns `schedule.costs` of a spec into the profile to use:

    auto    a measured profile that matches the spec and the machine (the user's folder, then those shipped),
            else one computed from data-sheet rates for the spec's own model, marked as assumed
    NAME    the profile of that name, from the user's folder or shipped
    PATH    a profile file: what contains a `/` or ends in `.json`

A measured profile whose fit was poor is a record of what was measured; nothing is predicted with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcpbench.dcp.costs import CostModel, Link, LongKernel, h200
from dcpbench.errors import SpecError
from dcpbench.spec import Spec

SHIPPED = Path(__file__).resolve().parent / "profiles"
"""Profiles that come with dcpbench."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class Hop(_Part):
    """A `Link`: seconds, bytes per second."""

    latency: float = Field(ge=0)
    bandwidth: float = Field(gt=0)


class Long(_Part):
    """A `LongKernel`, by the same names and in the same units."""

    square: float = Field(ge=0)
    keys: float = Field(gt=0)
    work: float = Field(gt=0)


class Coefficients(_Part):
    """The numbers of a `CostModel`, by the same names and in the same units."""

    layers: int = Field(ge=1)
    base: float = Field(ge=0)
    token: float = Field(gt=0)
    square: float = Field(ge=0)
    merge: float = Field(ge=0)
    hop_bytes: tuple[float, float]
    node_size: int = Field(ge=1)
    within: Hop
    between: Hop
    forward_share: float = Field(2 / 7, ge=0, le=1)
    floor: float = Field(0.0, ge=0)
    floor_shared: float = Field(0.0, ge=0)
    overlap: float = Field(1.0, ge=0, le=1)
    long: Long | None = None


class Key(_Part):
    """What a measurement depends on. Profiles match where all of it but `versions` and `backend` is equal."""

    gpu: str
    """As the driver names it; `cpu` for ranks on CPU."""
    ranks: int
    """Ranks that ran at the same time. On CPU they share cores, so there the number must match too."""
    model: dict[str, str | int | bool]
    """The fields of `spec.model` that decide what is computed."""
    dtype: str
    attention: str
    """`cases.attention` as asked for."""
    recompute: str
    deterministic: bool
    backend: str | None = None
    """The attention backend that was really used."""
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def model_hash(self) -> str:
        """Eight hexadecimal digits that models of the same shape share."""
        return hashlib.sha256(json.dumps(self.model, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def stem(self) -> str:
        """A file name for what this key describes, without suffix."""
        parts = (self.gpu, self.model_hash, self.dtype, self.attention, self.recompute)
        words = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts]
        words += ["deterministic"] * self.deterministic + [f"{self.ranks}-ranks"] * (self.gpu == "cpu")
        torch = re.sub(r"[^A-Za-z0-9.]+", "-", self.versions.get("torch", "unknown"))
        return "-".join([*words, f"torch-{torch}"])

    def matches(self, other: Key) -> bool:
        """Whether what was measured under one key holds for the other, versions apart."""
        names = ("gpu", "model", "dtype", "attention", "recompute", "deterministic")
        return all(getattr(self, name) == getattr(other, name) for name in names) and (
            self.gpu != "cpu" or self.ranks == other.ranks
        )


class Fit(_Part):
    """How well the coefficients describe what they were not fitted to; errors are relative."""

    of: Literal["microbatches", "iterations"] = "microbatches"
    """What was fitted and held out: microbatches timed apart, or whole iterations of runs."""
    points: int
    held_out: int
    mape: float
    """Mean absolute error of what was held out, in the time of a mean one for those that take less."""
    p95: float
    """95 % of them have no larger error."""
    fitted_mape: float
    most_tokens: int | None = None
    """The most padded tokens a rank had in a microbatch; beyond them the coefficients extrapolate."""
    sizes: tuple[int, ...] = ()
    """The CP sizes of the microbatches; beyond the greatest the coefficients extrapolate. Empty where not known."""
    refused: str | None = None
    """Why nothing is predicted with these coefficients; None where the fit is good."""


class Iteration(_Part):
    """What an iteration takes beside its microbatches, measured on the key's ranks."""

    seconds: float = Field(ge=0)
    """Gradient reduction as far as nothing hides it, optimizer, and the host's work around them."""
    iterations: int = 0
    """How many iterations were measured."""
    mape: float | None = None
    """Mean absolute relative error of the predicted time of each, by a fit to the others."""
    pace: float = Field(1.0, gt=0)
    """What the coefficients of the device were multiplied with, so that microbatches timed apart agree with iterations:
    clocks fall under lasting load. 1 where they were fitted to iterations."""


class CostProfile(_Part):
    """One profile file."""

    format: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: Literal["assumed", "measured"]
    """assumed: from data sheets and arithmetic. measured: fitted to microbatches that were timed."""
    description: str = ""
    created: str | None = None
    key: Key | None = None
    coefficients: Coefficients
    iteration: Iteration | None = None
    fit: Fit | None = None

    @property
    def cost(self) -> CostModel:
        """The cost model with these coefficients."""
        return cost_of(self.coefficients, self.name, assumed=self.kind == "assumed")

    @property
    def iteration_seconds(self) -> float:
        """What to add to a makespan for the time of an iteration; 0 where it was not measured."""
        return self.iteration.seconds if self.iteration else 0.0

    @property
    def refused(self) -> str | None:
        """Why nothing is predicted with this profile; None for one that can be used."""
        return self.fit.refused if self.fit else None

    @property
    def basis(self) -> str:
        """What a report says figures rest on: `measured profile NAME` or `assumed profile NAME`."""
        return f"{self.kind} profile {self.name}"


def cost_of(values: Coefficients, name: str, *, assumed: bool) -> CostModel:
    """The cost model with these numbers."""
    return CostModel(
        name=name,
        assumed=assumed,
        within=Link(values.within.latency, values.within.bandwidth),
        between=Link(values.between.latency, values.between.bandwidth),
        long=None if values.long is None else LongKernel(**values.long.model_dump()),
        **values.model_dump(exclude={"within", "between", "long"}),
    )


def coefficients_of(cost: CostModel) -> Coefficients:
    """The file form of a cost model's numbers."""
    names = [name for name in Coefficients.model_fields if name not in ("within", "between", "long")]
    return Coefficients(
        **{name: getattr(cost, name) for name in names},
        long=None if cost.long is None else Long(**asdict(cost.long)),
        within=Hop(latency=cost.within.latency, bandwidth=cost.within.bandwidth),
        between=Hop(latency=cost.between.latency, bandwidth=cost.between.bandwidth),
    )


def load(path: Path) -> CostProfile:
    """The profile in a file, usable or not.

    Raises:
        SpecError: it cannot be read or is no profile; names the file and the field.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SpecError(f"the cost profile {path} cannot be read: {error.strerror}") from None
    try:
        return CostProfile.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise SpecError(
            f"{path} is no cost profile: {where}: {problem['type'].replace('_', ' ')}; make one with dcpbench calibrate"
        ) from None


def dump(profile: CostProfile) -> str:
    """The text of a profile file; `load` reads it back equal."""
    return json.dumps(profile.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `dcpbench calibrate` puts profiles: `dcpbench/profiles` below XDG_DATA_HOME or `~/.local/share`."""
    base = environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "dcpbench" / "profiles"


def profiles(folders: Sequence[Path]) -> Iterator[CostProfile]:
    """Every readable profile of the folders, in order; other files are passed over."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                yield load(path)
            except SpecError:
                continue


def key_of(spec: Spec, gpu: str) -> Key:
    """What a profile for this spec on this device (`cpu`, or the GPU's name) must match."""
    model = spec.model
    dtype = spec.training.dtype
    if dtype == "auto":
        dtype = "float32" if gpu == "cpu" else "bfloat16"
    try:
        versions = {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        versions = {}
    return Key(
        gpu=gpu,
        ranks=spec.topology.world_size,
        model={
            **model.model_dump(include={"flavour", "layers", "hidden_size", "ffn_hidden_size", "attention_heads"}),
            "kv_heads": model.kv,
            "head_dim": model.dim,
            "vocab_size": model.vocab_size,
            "tie_embeddings": model.tied,
        },
        dtype=dtype,
        attention=spec.cases.attention,
        recompute=spec.training.recompute,
        deterministic=spec.training.deterministic,
        versions=versions,
    )


def resolve(spec: Spec, gpu: str, folders: Sequence[Path] | None = None) -> CostProfile:
    """The profile that `schedule.costs` of a spec means on this device.

    Args:
        spec: also supplies the model, compute type, attention backend and recomputation to match.
        gpu: the GPU's name as the driver has it, or `cpu`.
        folders: where to look, best first; default: the user's, then the shipped ones.

    Raises:
        SpecError: a named profile does not exist, cannot be read, or its fit was too poor to predict with.
    """
    wanted = spec.schedule.costs
    looked = (user_folder(), SHIPPED) if folders is None else folders
    if wanted == "auto":
        return _matching(key_of(spec, gpu), spec.cases.max_seqlen_per_dp_cp_rank, looked) or assumed(spec)
    if "/" in wanted or wanted.endswith(".json"):
        found = load(Path(os.path.expanduser(wanted)))
    else:
        known = {profile.name: profile for profile in reversed(list(profiles(looked)))}
        if wanted not in known:
            raise SpecError(
                f"schedule.costs: there is no cost profile {wanted!r}; known: auto, {', '.join(sorted(known))}, "
                "or give the path of a file"
            )
        found = known[wanted]
    if found.refused:
        raise SpecError(f"schedule.costs: {wanted} cannot be used: {found.refused}")
    return found


def _matching(key: Key, capacity: int, folders: Sequence[Path]) -> CostProfile | None:
    """The first usable measured profile that matches: best one measured up to this capacity, then one of this torch."""
    found = [
        profile
        for profile in profiles(folders)
        if profile.kind == "measured" and profile.key and profile.key.matches(key) and not profile.refused
    ]
    torch = key.versions.get("torch")

    def lacks(profile: CostProfile) -> tuple[bool, bool]:
        most = profile.fit.most_tokens if profile.fit else None
        assert profile.key is not None
        return most is not None and most < 0.9 * capacity, profile.key.versions.get("torch") != torch

    return min(found, key=lacks, default=None)


def matrix_parameters(spec: Spec) -> int:
    """Parameters of the spec's model that every token is multiplied with: blocks and output layer."""
    model = spec.model
    queries, keys = model.attention_heads * model.dim, model.kv * model.dim
    matrices = 3 if model.flavour == "modern" else 2
    block = model.hidden_size * (model.ffn_hidden_size * matrices + 2 * queries + 2 * keys)
    return model.layers * block + model.hidden_size * model.vocab_size


def assumed(spec: Spec) -> CostProfile:
    """Assumed coefficients for the spec's model on H200, by the rates of `costs.h200`."""
    model = spec.model
    cost = h200(
        "assumed-h200",
        parameters=matrix_parameters(spec),
        layers=model.layers,
        hidden=model.hidden_size,
        query=model.attention_heads * model.dim,
        key_value=model.kv * model.dim,
    )
    return CostProfile(
        name=cost.name,
        kind="assumed",
        description="Data-sheet rates of an H200 applied to this model; nothing was measured.",
        coefficients=coefficients_of(cost),
    )
