"""What is refused before Megatron-LM is started: fields, topology, data, environment, checkout, build."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcpbench import preflight
from dcpbench.checks.gpus import Gpu, GpuSurvey
from dcpbench.data.stream import SampleStream
from dcpbench.data.tokens import Counting
from dcpbench.megatron import checks, environment, probe
from dcpbench.spec import Spec

CHECKOUT = Path(__file__).parents[2] / "data" / "megatron_checkout"
GOOD: dict[str, dict[str, Any]] = {
    "topology": {"device": "cuda", "gpus_per_node": 4, "cp": 4},
    "training": {"iterations": 2, "warmup_iterations": 0, "global_batch_size": 4},
    "cases": {"padding": "megatron"},
    "megatron": {"checkout": str(CHECKOUT)},
}
GPUS = GpuSurvey(gpus=tuple(Gpu(name=str(n), model="H", processes=0) for n in range(8)))


def spec(**sections: Any) -> Spec:
    tree = {name: {**GOOD.get(name, {}), **sections.get(name, {})} for name in {*GOOD, *sections}}
    return Spec.model_validate({"runner": "megatron_lm", **tree})


def refused(s: Spec, environ: dict[str, str] | None = None, device: str = "cuda", **known: Any) -> list[str]:
    found = checks.findings(s, device=device, environ=environ or {}, **known)
    return [finding.message for finding in found if finding.level == "refuse"]


def stream(s: Spec, lengths: list[int]) -> SampleStream:
    array = np.array(lengths, np.int64)
    size, iterations = s.training.global_batch_size, s.training.iterations
    return SampleStream(array, array - 1, Counting(s.model.vocab_size), global_batch_size=size, iterations=iterations)


def test_a_good_spec_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_version", lambda _: "2.20.2")
    assert refused(spec()) == []
    assert preflight.inspect(spec(), environ={}, gpus=GPUS).refusals == ()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"training": {"dtype": "float32"}}, "training.dtype is float32"),
        ({"training": {"save_path": "x"}}, "training.save_path is set"),
        ({"training": {"profile_iterations": [1]}}, "training.profile_iterations is set"),
        ({"training": {"load_path": "x"}}, "training.load_path x is no Megatron-LM checkpoint"),
        ({"cases": {"padding": "minimal"}}, "set cases.padding: megatron"),
        ({"cases": {"attention": "te"}}, "choose with megatron.attention_backend"),
        ({"cases": {"baseline": {"scheduler": "default_dynamic_cp"}}}, "its fixed-CP case has dp_balanced only"),
        ({"cases": {"dcp": {"scheduler": "dp_balanced"}}}, "its dynamic case has default_dynamic_cp only"),
        ({"model": {"rope_theta": 10000.5}}, "model.rope_theta is 10000.5"),
        ({"model": {"max_position_embeddings": 512}}, "is below the sequence length 1024"),
        ({"topology": {"gpus_per_node": 6, "cp": 2}}, "DP x CP is 6"),
        ({"topology": {"gpus_per_node": 8}, "training": {"global_batch_size": 5}}, "is no multiple of DP 2"),
        ({"topology": {"gpus_per_node": 6, "cp": 2, "tp": 3}}, "model.attention_heads 4 is no multiple"),
        ({"topology": {"gpus_per_node": 12, "pp": 3}}, "model.layers 2 is no multiple of topology.pp 3"),
        ({"data": {"kind": "lognormal", "tokens": "zipf"}}, "set data.tokens: counting"),
        ({"data": {"kind": "text", "path": "x"}}, "Megatron-LM needs the folder of a Hugging Face tokenizer"),
        ({"data": {"kind": "text", "path": "x", "too_long": "drop"}}, "can only cut"),
        ({"data": {"kind": "text", "path": "x", "text_column": "body"}}, "must be called text"),
        ({"data": {"kind": "text", "path": "x", "loss_on": "response"}}, "does not go with megatron.prompt_format"),
        ({"megatron": {"prompt_format": "nemotron-nano-v2"}, "data": {"kind": "text", "path": "x"}}, "prompt_format"),
        ({"megatron": {"extra_flags": ["--bf16"]}}, "--bf16 is decided by training.dtype"),
        ({"megatron": {"checkout": None}}, "megatron.checkout is not set"),
        ({"megatron": {"checkout": "/no/such/folder"}}, "is no folder"),
    ],
)
def test_what_megatron_cannot_do_is_refused(sections: dict[str, Any], sentence: str) -> None:
    assert any(sentence in message for message in refused(spec(**sections)))


def test_the_cpu_is_refused() -> None:
    assert "CUDA only" in refused(spec(), device="cpu")[0]


def test_transformer_engine_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_version", lambda _: "2.8.0")
    (message,) = [found.message for found in preflight.inspect(spec(), environ={}, gpus=GPUS).refusals]
    assert message.startswith("runner megatron_lm: Transformer Engine 2.8.0 is installed")


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"NVTE_FLASH_ATTN": "1"}, "NVTE_FLASH_ATTN"),
        ({"NVTE_FUSED_ATTN": "0"}, "NVTE_FUSED_ATTN"),
        ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        ({"NVTE_APPLY_QK_LAYER_SCALING": "1"}, "NVTE_APPLY_QK_LAYER_SCALING"),
    ],
)
def test_a_variable_that_contradicts_the_spec_is_refused(environ: dict[str, str], name: str) -> None:
    assert [message.startswith(name) for message in refused(spec(), environ)] == [True]


def test_variables_that_agree_are_fine() -> None:
    agreeing = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}
    assert refused(spec(), agreeing) == []


def test_determinism_sets_and_demands_its_variables() -> None:
    s = spec(training={"deterministic": True})
    values = environment.settings(s)
    assert values["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert (values["NCCL_ALGO"], values["CUBLAS_WORKSPACE_CONFIG"]) == ("Ring", ":4096:8")
    assert "NCCL_ALGO must be Ring" in refused(s, {"NCCL_ALGO": "Tree"})[0]
    assert refused(s, {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == []


def test_the_checkout_comes_first_on_the_python_path() -> None:
    values = environment.variables(spec(), Path("/m"), {"PYTHONPATH": "/other"})
    assert values["PYTHONPATH"] == "/m:/other"


def test_the_build_calls_the_python_that_trains() -> None:
    values = environment.variables(spec(), Path("/m"), {"PATH": "/usr/bin"})
    assert values["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_build_for_another_python_is_refused(tmp_path: Path) -> None:
    """The compiled helpers would bear a name under which this Python does not look."""
    folder = Path(shutil.copytree(CHECKOUT, tmp_path / "m"))
    (folder / "megatron/core/datasets/helpers.cpp").write_text("")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3-config").write_text("#!/bin/sh\necho .cpython-38-other.so\n")
    (programs / "python3-config").chmod(0o755)
    environ = {"PATH": str(programs)}
    found = " ".join(refused(spec(megatron={"checkout": str(folder)}), environ))
    own = (Path(sys.executable).parent / "python3-config").exists()
    assert own or "is that of another Python (.cpython-38-other.so, not " in found


@pytest.mark.parametrize("lost", ["pretrain_gpt.py", "gpt_builders.py"])
def test_a_package_without_the_script_is_no_checkout(tmp_path: Path, lost: str) -> None:
    folder = Path(shutil.copytree(CHECKOUT, tmp_path / "m"))
    (folder / lost).unlink()
    (message,) = probe.missing(folder)
    assert f"has no {lost}" in message


def test_a_checkout_says_all_that_it_lacks_and_where_that_was_looked_for(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKOUT, tmp_path / "m"))
    (folder / "megatron/core/model_parallel_config.py").write_text("")
    (folder / "megatron/training/arguments.py").write_text(
        "hybrid_context_parallel = 1\nmy_dynamic_context_parallel_x = 1\n"
    )
    found = probe.missing(folder)
    assert len(found) == 6
    assert all("megatron/training/arguments.py" in message for message in found)
    assert probe.missing(CHECKOUT) == []


def test_what_the_first_start_compiles_with_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(CHECKOUT, tmp_path / "m"))
    source = folder / "megatron/core/datasets/helpers.cpp"
    source.write_text("")
    s = spec(megatron={"checkout": str(folder)})
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "pybind11" else object())
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name in {"g++", "make"} else f"/usr/bin/{name}")
    messages = " ".join(refused(s))
    for word in ("`make` is not there", "`g++` is not there", "pip install pybind11"):
        assert word in messages
    (source.parent / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("")
    assert "pybind11" not in " ".join(refused(s))


def test_mock_data_need_a_vocabulary_larger_than_the_longest_sample() -> None:
    s = spec(model={"vocab_size": 512})
    assert refused(s, stream=stream(s, [500, 511])) == []
    assert "raise model.vocab_size above 512" in refused(s, stream=stream(s, [500, 512]))[0]


def test_padding_under_sequence_parallelism_counts() -> None:
    s = spec(
        topology={"gpus_per_node": 8, "cp": 4, "tp": 2},
        data={"kind": "list", "lengths": [100]},
        cases={"max_seqlen_per_dp_cp_rank": 25},
    )
    assert (
        "112 when padded to a multiple of 16 (TP 2); the baseline case holds 100"
        in refused(s, stream=stream(s, [100]))[0]
    )
