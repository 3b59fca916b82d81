"""Whether a spec can run on a Megatron-LM checkout here: what preflight asks beside what holds for every runner."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from dcpbench.checks.findings import Finding, ok, refuse, warn
from dcpbench.checks.servable import Stream
from dcpbench.megatron import environment, probe
from dcpbench.megatron.flags import draws_its_own_lengths, extra_flag_conflicts, sequence_length
from dcpbench.spec import Spec, TextData

_PROMPTS = ("instruction", "prompt", "query", "question")
_RESPONSES = ("output", "response", "completion", "answer")
"""Column names under which Megatron-LM finds a prompt and its response."""
_EXTENSION = sysconfig.get_config_var("EXT_SUFFIX")
"""How this Python names a compiled module."""
_FUSED_LIMIT = 2**30
"""Heads x (longest sequence)^2 from which cuDNN has no deterministic backward for packed sequences on Hopper."""


def findings(spec: Spec, *, device: str, environ: Mapping[str, str], stream: Stream | None = None) -> list[Finding]:
    """Everything to say about a spec with `runner: megatron_lm`; nothing is started.

    Args:
        spec: what is to run.
        device: what preflight resolved `topology.device` to.
        environ: the environment that launches would get.
        stream: the prepared data; None before there are any.
    """
    if stream is not None:
        return [*_lengths(spec, stream)]
    found = [*_fields(spec, device), *_topology(spec), *_data(spec)]
    found += [refuse("extra flags", sentence) for sentence in extra_flag_conflicts(spec.megatron.extra_flags)]
    return [*found, *environment.findings(spec, environ), *_checkout(spec, environ), *_packages(spec)]


def _fields(spec: Spec, device: str) -> Iterator[Finding]:
    training, cases = spec.training, spec.cases
    wrong = {
        f"topology.device is {device}: Megatron-LM trains these cases on CUDA only": device != "cuda",
        "training.dtype is float32: its attention on packed sequences needs bfloat16": training.dtype == "float32",
        "training.save_path is set: both cases would write the same checkpoint; leave it unset": training.save_path,
        "training.profile_iterations is set: only the built-in worker profiles; leave it empty": (
            training.profile_iterations
        ),
        f"cases.padding is {cases.padding}: its padding is fixed; set cases.padding: megatron": (
            cases.padding != "megatron"
        ),
        f"cases.attention is {cases.attention}: set it to auto and choose with megatron.attention_backend": (
            cases.attention != "auto"
        ),
        f"cases.baseline.scheduler is {cases.baseline.scheduler}: its fixed-CP case has dp_balanced only": (
            cases.baseline.scheduler != "dp_balanced"
        ),
        f"cases.dcp.scheduler is {cases.dcp.scheduler}: its dynamic case has default_dynamic_cp only": (
            cases.dcp.scheduler != "default_dynamic_cp"
        ),
        f"model.rope_theta is {spec.model.rope_theta}: it takes whole numbers only": (
            spec.model.flavour == "modern" and not spec.model.rope_theta.is_integer()
        ),
    }
    for sentence, applies in wrong.items():
        if applies:
            yield refuse("runner", f"runner megatron_lm: {sentence}")
    length, rows = sequence_length(spec), spec.model.max_position_embeddings
    if rows is not None and rows < length:
        yield refuse(
            "positions",
            f"model.max_position_embeddings {rows} is below the sequence length {length} that Megatron-LM is given; "
            "raise it",
        )
    if training.load_path is not None and not (training.load_path / "latest_checkpointed_iteration.txt").is_file():
        yield refuse(
            "load_path",
            f"training.load_path {training.load_path} is no Megatron-LM checkpoint: it has no "
            "latest_checkpointed_iteration.txt",
        )


def _topology(spec: Spec) -> Iterator[Finding]:
    top, model = spec.topology, spec.model
    for field, size in (("attention_heads", model.attention_heads), ("kv_heads", model.kv)):
        if size % top.tp:
            yield refuse("tp", f"model.{field} {size} is no multiple of topology.tp {top.tp}")
    if model.layers % top.pp:
        yield refuse("pp", f"model.layers {model.layers} is no multiple of topology.pp {top.pp}")
    if top.domain_size & (top.domain_size - 1):
        yield refuse(
            "domain",
            f"DP x CP is {top.domain_size}: Megatron-LM's dynamic groups need a power of two; change topology.cp or "
            "gpus_per_node",
        )
    if spec.training.global_batch_size % top.dp:
        yield refuse(
            "global batch",
            f"training.global_batch_size {spec.training.global_batch_size} is no multiple of DP {top.dp}",
        )


def _data(spec: Spec) -> Iterator[Finding]:
    data = spec.data
    if not isinstance(data, TextData):
        if data.tokens != "counting":
            yield refuse(
                "tokens",
                f"data.tokens is {data.tokens}: Megatron-LM's mock has counting tokens only; set data.tokens: counting",
            )
        return
    if data.tokenizer == "byte":
        yield refuse("tokenizer", "data.tokenizer is byte: Megatron-LM needs the folder of a Hugging Face tokenizer")
    if data.too_long == "drop":
        yield refuse(
            "too long", "data.too_long is drop: Megatron-LM reads the file itself and can only cut; choose cut"
        )
    columns = {
        "messages_column": (data.messages_column, ("messages",)),
        "prompt_column": (data.prompt_column, _PROMPTS),
        "response_column": (data.response_column, _RESPONSES),
        "text_column": (data.text_column, ("text",)),
    }
    for field, (name, known) in columns.items():
        if name is not None and name not in known:
            yield refuse(
                "columns",
                f"data.{field} is {name}: Megatron-LM finds its columns by name, and this one must be called "
                f"{' or '.join(known)}",
            )
    if (data.loss_on == "response") == (spec.megatron.prompt_format == "default"):
        yield refuse(
            "loss_on",
            f"data.loss_on {data.loss_on} does not go with megatron.prompt_format {spec.megatron.prompt_format}: "
            "default trains on all tokens, the others on responses",
        )


def _checkout(spec: Spec, environ: Mapping[str, str]) -> Iterator[Finding]:
    checkout = spec.megatron.checkout
    if checkout is None:
        yield refuse("checkout", "megatron.checkout is not set: runner megatron_lm needs a Megatron-LM checkout")
        return
    lacking = probe.missing(checkout)
    for sentence in lacking:
        yield refuse("checkout", sentence)
    if lacking:
        return
    yield ok("checkout", f"{checkout} has all that both cases need")
    if not (checkout / ".git").exists():
        yield warn("commit", f"megatron.checkout {checkout} is no git checkout: the manifest cannot name its commit")
    yield from _build(checkout, environ)


def _build(checkout: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Rank 0 runs `make` for the data-set helpers at every start, also for mock data."""
    if shutil.which("make", path=environment.program_path(environ)) is None:
        yield refuse("build", "`make` is not there: Megatron-LM runs it at every start; install it")
    if probe.helpers_are_built(checkout):
        yield ok("build", "the data-set helpers of Megatron-LM are built")
        return
    needs = "Megatron-LM compiles its data-set helpers at the first start"
    path = environment.program_path(environ)
    for program in ((environ.get("CXX") or "g++").split()[0], "python3-config"):
        if shutil.which(program, path=path) is None:
            yield refuse("build", f"`{program}` is not there: {needs}; install it")
        elif program == "python3-config" and (suffix := _extension_suffix(path)) not in (None, _EXTENSION):
            yield refuse(
                "build",
                f"`python3-config` is that of another Python ({suffix}, not {_EXTENSION}): {needs}; put the right one "
                "first on PATH, or build them beforehand",
            )
    if find_spec("pybind11") is None:
        yield refuse("build", f"the package pybind11 is not there: {needs}; pip install pybind11")
    if not os.access(probe.helpers_folder(checkout), os.W_OK):
        yield refuse("build", f"{probe.helpers_folder(checkout)} cannot be written: {needs}; build them beforehand")


def _extension_suffix(path: str) -> str | None:
    """How `python3-config` would name a compiled module; None where it does not say."""
    try:
        done = subprocess.run(
            ["python3-config", "--extension-suffix"],
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _packages(spec: Spec) -> Iterator[Finding]:
    text = isinstance(spec.data, TextData)
    wanted = ("datasets", "pandas", "transformers") if text else () if draws_its_own_lengths(spec) else ("pandas",)
    for package in wanted:
        if find_spec(package) is None:
            yield refuse(
                "packages", f"the package {package} is not there: Megatron-LM reads data.kind {spec.data.kind} with it"
            )


def _lengths(spec: Spec, stream: Stream) -> Iterator[Finding]:
    import numpy as np  # noqa: PLC0415 - only where there are data

    top, capacity = spec.topology, spec.cases.max_seqlen_per_dp_cp_rank
    positions = np.arange(stream.iterations * stream.global_batch_size)
    longest = int(stream.lengths(positions).max())
    if top.tp > 1:
        # Sequence parallelism multiplies the padding, which `servable` counts without it.
        for case, ranks in (("baseline", top.cp), ("dcp", top.domain_size)):
            multiple = 2 * ranks * top.tp
            padded = -(-(longest - 1) // multiple) * multiple
            if padded > ranks * capacity:
                yield refuse(
                    "longest sample",
                    f"the longest sample has {longest} tokens, {padded} when padded to a multiple of {multiple} (TP "
                    f"{top.tp}); the {case} case holds {ranks * capacity}: raise cases.max_seqlen_per_dp_cp_rank",
                )
    if not isinstance(spec.data, TextData) and longest >= spec.model.vocab_size:
        yield refuse(
            "vocabulary",
            f"the longest sample has {longest} tokens, but model.vocab_size is {spec.model.vocab_size}: Megatron-LM's "
            f"mock counts 1, 2, 3, ... within a sample; raise model.vocab_size above {longest}",
        )
    if longest > sequence_length(spec) + 1:
        yield refuse(
            "longest sample",
            f"the longest sample has {longest} tokens and Megatron-LM would cut it at {sequence_length(spec)}; raise "
            "cases.max_seqlen_per_dp_cp_rank, or lower data.max_length",
        )
    if spec.training.deterministic and spec.model.attention_heads // top.tp * longest**2 >= _FUSED_LIMIT:
        yield warn(
            "determinism",
            f"training.deterministic with {longest} tokens and {spec.model.attention_heads} heads: on Hopper there "
            "may be no deterministic attention for packed sequences of this size",
        )
