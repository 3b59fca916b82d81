"""The environment variables that Megatron-LM has rules about: what a launch sets, and what it does not tolerate.

Source of the rules: Megatron-LM's argument validation (branch `dev`, commit d48bd6be) and Transformer Engine 2.20.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dcpbench.checks.findings import Finding, ok, refuse
from dcpbench.spec import Spec

_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_BACKEND_VALUES = {"fused": ("0", "1", "0"), "flash": ("1", "0", "0"), "auto": ("1", "1", "1")}
_DETERMINISTIC_ALGORITHMS = {"Ring", "CollnetDirect", "CollnetChain", "^NVLS"}


def settings(spec: Spec) -> dict[str, str]:
    """What every launch of a spec sets, the same in both cases."""
    values = {
        # One hardware queue: kernels start in the order in which they were issued (needed up to Hopper).
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if spec.training.deterministic else "1",
    }
    if spec.training.deterministic:
        values |= {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return values


def variables(spec: Spec, checkout: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`settings`, and where programs and modules are found: this Python first, and the checkout's own modules.

    Its build calls `python3`, which must be the one that trains; an installed megatron-core must not come before it.
    """
    modules = [str(checkout), *filter(None, [environ.get("PYTHONPATH")])]
    return settings(spec) | {"PYTHONPATH": os.pathsep.join(modules), "PATH": program_path(environ)}


def program_path(environ: Mapping[str, str]) -> str:
    """`PATH` with the folder of this Python at its head."""
    return os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH") or os.defpath])


def findings(spec: Spec, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A refusal for each variable of this environment that Megatron-LM would stop at, or that a launch would change."""
    problems = list(_problems(spec, environ))
    yield from problems
    if not problems:
        shown = " ".join(f"{name}={value}" for name, value in settings(spec).items())
        yield ok("megatron environment", f"Megatron-LM gets {shown}")


def _problems(spec: Spec, environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in settings(spec).items():
        held = environ.get(name)
        if name == "NCCL_ALGO" and held is not None:
            if not set(held.split(",")) <= _DETERMINISTIC_ALGORITHMS:
                yield _refuse(f"NCCL_ALGO must be Ring for training.deterministic, not {held}; unset it")
        elif name == "CUBLAS_WORKSPACE_CONFIG" and held in (":16:8", None):
            continue
        elif held not in (None, value):
            yield _refuse(f"{name} must be {value} for this spec under Megatron-LM; unset it, each launch sets it")
    backend = spec.megatron.attention_backend
    for name, value in zip(_BACKENDS, _BACKEND_VALUES[backend], strict=True):
        if environ.get(name) not in (None, value):
            yield _refuse(
                f"{name} contradicts megatron.attention_backend {backend}; unset it, Megatron-LM sets it by itself"
            )
    if environ.get("NVTE_APPLY_QK_LAYER_SCALING") not in (None, "0"):
        yield _refuse("NVTE_APPLY_QK_LAYER_SCALING needs a flag that no spec sets; unset it")
    if spec.training.deterministic and not environ.get("MAMBA_DETERMINISTIC", "1").startswith("1"):
        yield _refuse("MAMBA_DETERMINISTIC must be 1 for training.deterministic; unset it")


def _refuse(message: str) -> Finding:
    return refuse("megatron environment", message)
