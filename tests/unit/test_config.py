"""Layers, sources, the YAML that people really write, and errors that name the place and no value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dcpbench import config
from dcpbench.errors import ExitCode, SpecError
from dcpbench.settings import fields, yamltext
from dcpbench.spec import CsvData, ListData, LognormalData, Spec, TextData, UniformData

SECRET = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7"


def load(
    tmp_path: Path,
    text: str | bytes | None = None,
    environ: Mapping[str, str] | None = None,
    *overrides: str,
    name: str = "bench.yaml",
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> config.ResolvedSpec:
    path = None
    if text is not None:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load(path, environ=environ or {}, overrides=overrides, options=options)


def refusal(tmp_path: Path, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, *args, **kwargs)
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.__cause__ is None
    return str(caught.value)


# Layers and sources


def test_defaults_alone(tmp_path: Path) -> None:
    resolved = load(tmp_path)
    assert resolved.spec == Spec()
    assert set(resolved.sources.values()) == {"default"}
    assert "training.iterations" in resolved.sources
    assert "cases.baseline.scheduler" in resolved.sources
    assert "data.sigma" in resolved.sources


def test_each_layer_beats_the_one_below(tmp_path: Path) -> None:
    text = "training: {iterations: 30, warmup_iterations: 3, global_batch_size: 8}\ntopology: {cp: 2}\n"
    environ = {"TRAIN_ITERS": "40", "GLOBAL_BATCH_SIZE": "32", "TP_SIZE": ""}
    resolved = load(
        tmp_path, text, environ, "training.iterations=50", options={"launches.pairs": ("--pairs", 3)}
    )  # fmt: skip
    training = resolved.spec.training
    assert (training.iterations, training.warmup_iterations, training.global_batch_size) == (50, 3, 32)
    assert resolved.spec.launches.pairs == 3
    sources = resolved.sources
    assert sources["training.iterations"] == "--set"
    assert sources["training.global_batch_size"] == "environment GLOBAL_BATCH_SIZE"
    assert sources["training.warmup_iterations"] == "file bench.yaml"
    assert sources["launches.pairs"] == "--pairs"
    assert sources["topology.tp"] == "default"


def test_every_environment_name_of_the_product_is_honoured(tmp_path: Path) -> None:
    environ = {
        "DATASET_PATH": "d.jsonl", "TOKENIZER_MODEL": "tok", "LOAD_PATH": "ckpt", "GPUS_PER_NODE": "8", "TP_SIZE": "2",
        "CP_SIZE": "2", "PP_SIZE": "2", "MAX_SEQLEN_PER_DP_CP_RANK": "2048", "MIN_DYNAMIC_CONTEXT_PARALLEL_SIZE": "2",
        "TRAIN_ITERS": "33", "WARMUP_ITERS": "7", "GLOBAL_BATCH_SIZE": "12", "CASE_ORDER": "dcp_first",
        "LOSS_ATOL": "1e-3", "LOSS_RTOL": "0", "CHECK_LOSS_PARITY": "0", "OUTPUT_DIR": "out", "ANALYZE_ONLY": "1",
    }  # fmt: skip
    assert set(environ) == {*config.ENVIRONMENT, "ANALYZE_ONLY"}
    resolved = load(tmp_path, None, environ)
    spec = resolved.spec
    assert isinstance(spec.data, TextData)
    assert (spec.data.path, spec.data.tokenizer) == (Path("d.jsonl"), "tok")
    assert spec.training.load_path == Path("ckpt")
    assert spec.topology.model_dump(exclude={"device", "nodes"}) == {"gpus_per_node": 8, "tp": 2, "cp": 2, "pp": 2}
    assert spec.cases.max_seqlen_per_dp_cp_rank == 2048
    assert spec.cases.min_dynamic_context_parallel_size == 2
    training = spec.training
    assert (training.iterations, training.warmup_iterations, training.global_batch_size) == (33, 7, 12)
    assert spec.launches.order == "dcp_first"
    assert (spec.tolerances.loss_atol, spec.tolerances.loss_rtol) == (1e-3, 0.0)
    assert spec.tolerances.check_loss_parity is False
    assert spec.output.dir == Path("out")
    for name, field in config.ENVIRONMENT.items():
        assert resolved.sources[field] == f"environment {name}"


@pytest.mark.parametrize(
    ("name", "near"),
    [("DCPBENCH_DEBGU", "DCPBENCH_DEBUG"), ("DCPBENCH_TP_SIZE", "TP_SIZE"), ("DCPBENCH_XYZ", "DCPBENCH_DEBUG")],
)
def test_unknown_own_variables(tmp_path: Path, name: str, near: str) -> None:
    assert refusal(tmp_path, None, {name: SECRET}) == (
        f"environment variable {name} is not known; the nearest valid one is {near}"
    )


# Data kinds


def test_dataset_path_makes_mock_data_real(tmp_path: Path) -> None:
    text = "data: {kind: lognormal, mean: 100, seed: 3, tokens: zipf}\n"
    resolved = load(tmp_path, text, {"DATASET_PATH": "~/x/d.jsonl"})
    assert isinstance(resolved.spec.data, TextData)
    assert resolved.spec.data.path == Path("~/x/d.jsonl").expanduser()
    assert resolved.sources["data.kind"] == "environment DATASET_PATH"
    assert "data.mean" not in resolved.sources
    assert resolved.sources["data.tokenizer"] == "default"


def test_dataset_path_of_lengths(tmp_path: Path) -> None:
    text = "data: {kind: lognormal, mean: 100, seed: 3, tokens: zipf}\n"
    data = load(tmp_path, text, {"DATASET_PATH": "LENGTHS.CSV"}).spec.data
    assert data == CsvData(path=Path("LENGTHS.CSV"), seed=3, tokens="zipf")


def test_dataset_path_on_text_keeps_its_fields(tmp_path: Path) -> None:
    text = "data: {kind: text, path: a.jsonl, prompt_column: q, response_column: r}\n"
    resolved = load(tmp_path, text, {"DATASET_PATH": "b.parquet"})
    assert resolved.spec.data == TextData(path=Path("b.parquet"), prompt_column="q", response_column="r")
    assert resolved.sources["data.kind"] == "file bench.yaml"


def test_set_of_a_kind_changes_the_kind(tmp_path: Path) -> None:
    text = "data: {kind: lognormal, mean: 100, sigma: 2, min_length: 4}\n"
    resolved = load(tmp_path, text, {}, "data.kind=uniform", "data.max_length=99")
    assert resolved.spec.data == UniformData(min_length=4, max_length=99)
    assert load(tmp_path, text, {}, "data.kind=list", "data.lengths=[5, 6]").spec.data == ListData(lengths=(5, 6))
    assert load(tmp_path, text, {}, "data={kind: list, lengths: [5, 6]}").spec.data == ListData(lengths=(5, 6))
    # above the environment, which then has no effect
    resolved = load(tmp_path, text, {"DATASET_PATH": "x.jsonl"}, "data.kind=lognormal")
    assert resolved.spec.data == LognormalData(mean=100, sigma=2, min_length=4)


def test_kind_change_does_not_hide_a_typing_error(tmp_path: Path) -> None:
    text = "data:\n  kind: lognormal\n  maen: 100\n"
    assert "bench.yaml line 3: data.maen is not a known key" in refusal(tmp_path, text, {}, "data.kind=uniform")


def test_field_of_another_kind(tmp_path: Path) -> None:
    message = refusal(tmp_path, None, {}, "data.path=x.jsonl")
    assert message == "--set data.path: data.path is no field of data.kind lognormal; it belongs to csv, text: " \
                      "set data.kind too"  # fmt: skip


def test_tokenizer_without_text(tmp_path: Path) -> None:
    message = refusal(tmp_path, None, {"TOKENIZER_MODEL": "tok"})
    assert message.startswith("environment variable TOKENIZER_MODEL: data.kind lognormal has no tokenizer")


def test_unknown_kind(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"data:\n  kind: {SECRET}\n  other: 1\n")
    assert message == "bench.yaml line 2: data.kind must be lognormal, uniform, list, csv or text"


# Values


def test_a80_exponent_without_a_dot(tmp_path: Path) -> None:
    text = "tolerances:\n  loss_atol: 1e-3\n"
    assert load(tmp_path, text).spec.tolerances.loss_atol == 0.001
    assert load(tmp_path, None, {}, "tolerances.loss_atol=1e-3").spec.tolerances.loss_atol == 0.001
    assert load(tmp_path, None, {"LOSS_ATOL": "1e-3"}).spec.tolerances.loss_atol == 0.001


def test_a80_text_where_a_number_belongs(tmp_path: Path) -> None:
    text = "tolerances:\n  loss_atol: tight\n"
    assert refusal(tmp_path, text) == "bench.yaml line 2: tolerances.loss_atol must be a number"
    assert refusal(tmp_path, None, {"LOSS_ATOL": "tight"}) == (
        "environment variable LOSS_ATOL: tolerances.loss_atol must be a number"
    )


def test_a80_unknown_field(tmp_path: Path) -> None:
    assert refusal(tmp_path, "tolerances:\n  loss_atoll: 1\n") == (
        "bench.yaml line 2: tolerances.loss_atoll is not a known key; the nearest valid one is tolerances.loss_atol"
    )


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "1:30", "2026-01-01", "0b11", "1_000", "=", "0.1.2"])
def test_only_yaml_1_2_scalars_are_not_text(text: str) -> None:
    assert yamltext.value(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-1", -1), ("010", 10), ("0x1F", 31), ("true", True),
        ("null", None), ("", None), ("~", None), ("[1, 2e0, x]", [1, 2.0, "x"]), ("{a: 1}", {"a": 1}), ("'1'", "1"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    read = yamltext.value(text)
    assert read == value
    assert type(read) is type(value)


def test_words_are_booleans_only_for_boolean_fields(tmp_path: Path) -> None:
    assert load(tmp_path, "tolerances: {check_loss_parity: off}").spec.tolerances.check_loss_parity is False
    assert load(tmp_path, "name: on").spec.name == "on"
    assert load(tmp_path, None, {}, "launches.keep_going=yes").spec.launches.keep_going is True
    assert refusal(tmp_path, "model:\n  layers: true") == "bench.yaml line 2: model.layers must not be true or false"


def test_set_keeps_names_that_look_like_numbers(tmp_path: Path) -> None:
    assert load(tmp_path, None, {}, "name=2026").spec.name == "2026"
    spec = load(tmp_path, None, {}, "data.kind=text", "data.path=1e3").spec
    assert isinstance(spec.data, TextData)
    assert spec.data.path == Path("1e3")


def test_set_null_and_empty(tmp_path: Path) -> None:
    text = "model: {kv_heads: 2}"
    assert load(tmp_path, text, {}, "model.kv_heads=null").spec.model.kv_heads is None
    assert load(tmp_path, text, {}, "model.kv_heads=").spec.model.kv_heads is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("topology.cp", "--set needs `section.field=value`, for example --set topology.cp=2"),
        ("=2", "--set needs `section.field=value`, for example --set topology.cp=2"),
        ("topology.cpp=2", "--set topology.cpp: topology.cpp is not a known key; the nearest valid one is topology.cp"),
        ("iterations=2", "--set iterations: iterations is not a known key; the nearest valid one is "
         "training.iterations"),
        ("topology=2", "--set topology: topology is a section; give its fields: cp, device, "
         "gpus_per_node, nodes, pp, tp"),
        ("topology.cp=[", "--set topology.cp: line 1: this is not YAML: expected the node content, "
         "but found '<stream end>'"),
        ("topology.cp=0", "--set topology.cp: topology.cp must be at least 1"),
        ("topology.cp=2.5", "--set topology.cp: topology.cp must be a whole number"),
        ("training.lr=.nan", "--set training.lr: training.lr must be a finite number"),
        ("cases.dcp.scheduler=x", "--set cases.dcp.scheduler: cases.dcp.scheduler must be dp_balanced, "
         "default_dynamic_cp or laminar"),
        ("model.flavour=old", "--set model.flavour: model.flavour must be 'modern' or 'classic'"),
        ("name=a b", "--set name: name must begin with a letter or digit and hold only letters, "
         "digits, `.`, `_` and `-`"),
    ],
)  # fmt: skip
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, None, {}, override) == message


def test_rules_over_several_fields_name_where_they_came_from(tmp_path: Path) -> None:
    message = refusal(tmp_path, "training:\n  iterations: 10\n", {"WARMUP_ITERS": "10"})
    assert message.startswith("training: warmup_iterations 10 leaves nothing to measure of 10 iterations")
    assert "training.iterations from bench.yaml line 2" in message
    assert "training.warmup_iterations from environment variable WARMUP_ITERS" in message


def test_missing_field_and_list_element(tmp_path: Path) -> None:
    assert refusal(tmp_path, "data: {kind: text}") == "bench.yaml: data.path is required"
    assert refusal(tmp_path, "data:\n  kind: list\n  lengths: [4, 1]\n") == (
        "bench.yaml line 3: data.lengths[1] must be at least 2"
    )


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = "nmae: x\ntraining:\n  iterations: many\n  lr: -1\ntopologie:\n  cp: 2\n  tp: 1\n"
    lines = refusal(tmp_path, text, {"DCPBENCH_X": "1"}).splitlines()
    assert lines[0] == "5 settings are wrong:"
    assert "  bench.yaml line 1: nmae is not a known key; the nearest valid one is name" in lines
    assert "  bench.yaml line 3: training.iterations must be a whole number" in lines
    assert "  bench.yaml line 4: training.lr must be greater than 0" in lines
    assert "  bench.yaml line 6: topologie.cp is not a known key; the nearest valid one is topology.cp" in lines


def test_a62_validation_error_does_not_print_the_secret_next_door(tmp_path: Path) -> None:
    text = f"data:\n  kind: text\n  hf_token: {SECRET}\n  tokenizer: [{SECRET}]\nname: {{{SECRET}: 1}}\n"
    message = refusal(tmp_path, text, {"LOSS_ATOL": SECRET, "DCPBENCH_TOKEN": SECRET}, f"training.lr={SECRET}")
    assert SECRET not in message
    assert "data.path is required" in message
    assert "data.hf_token is not a known key" in message
    for broken in (f"a: *{SECRET}\n", f"a: !{SECRET} 1\n", f"a: '{SECRET}\n", f"- {SECRET}\n", f"a: {SECRET}: b\n"):
        assert SECRET not in refusal(tmp_path, broken)


# Files


@pytest.mark.parametrize("encoded", ["training:\n  iterations: 30\n", '{"training": {"iterations": 30}}'])
def test_a66_byte_order_mark(tmp_path: Path, encoded: str) -> None:
    name = "bench.json" if encoded.startswith("{") else "bench.yaml"
    plain = load(tmp_path, encoded, name=name)
    marked = load(tmp_path, b"\xef\xbb\xbf" + encoded.encode(), name=name)
    assert plain == marked
    assert marked.spec.training.iterations == 30


def test_json_with_tabs_escapes_and_tight_colons(tmp_path: Path) -> None:
    text = '{\n\t"name":"a\\u002db",\n\t"tolerances":{"loss_atol":1E-3},\n\t'
    text += '"data":{"kind":"text","path":"\\ud83d\\ude00"}\n}'
    spec = load(tmp_path, text, name="bench.json").spec
    assert (spec.name, spec.tolerances.loss_atol) == ("a-b", 1e-3)
    assert isinstance(spec.data, TextData)
    assert spec.data.path == Path("\U0001f600")
    assert "bench.json line 3: training.iteratons" in refusal(
        tmp_path, '{\n"training": {\n"iteratons": 3}}', name="bench.json"
    )


def test_empty_files_and_sections_are_defaults(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "\ufeff", "training:\n  # iterations: 5\nmodel: {}\n"):
        assert load(tmp_path, text).spec == Spec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nname: x\nname: y\n", "bench.yaml line 3: the key name appears twice, first on line 2; keep one"),
        ("topology:\n  cp: 2\ntopology.cp: 4\n", "bench.yaml line 3: topology.cp is set twice, first on line 2;"),
        ('{"name": "x",\n "name": "y"}', "bench.yaml line 2: the key name appears twice, first on line 1; keep one"),
        ("- 1\n- 2\n", "the file holds a list where settings"),
        ("just words\n", "the file holds a single value where settings"),
        ("training:\n\titerations: 5\n", "bench.yaml line 2: a tab where YAML needs spaces"),
        ("a: 1\n---\nb: 2\n", "bench.yaml line 2: a second document"),
        ("a: b: c\n", "bench.yaml line 1: a second `: ` in one line"),
        ("name: x\n\x01\n", "bench.yaml line 2: a control character"),
        ("name: x\nmodel: [\n", "bench.yaml line 3: this is not YAML"),
        (b"name: x\nlabel: \x92\n", "bench.yaml line 2: not UTF-8 text"),
        ("name: &a [*a]\n", "an anchor that contains itself"),
        ("name: !!python/object:os.system x\n", "a YAML tag that is not used in specs"),
        ("[" * 2000, "nested too deeply"),
        ("? [a]\n: 1\n", "a key must be a name"),
        ("trainig: {}\n", "bench.yaml line 1: trainig is not a known key; the nearest valid one is"),
        ("cases:\n  baseline: dp_balanced\n", "line 2: cases.baseline is a section; give its fields: scheduler"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "model: &m {layers: 3, hidden_size: 32}\n"
    assert load(tmp_path, text).spec.model.layers == 3
    text = "data: &d {kind: uniform, min_length: 5}\n"
    assert load(tmp_path, text + "tolerances: {loss_atol: &x 1e-4, loss_rtol: *x}").spec.tolerances.loss_rtol == 1e-4
    merged = "training:\n  <<: {iterations: 30, lr: 1e-3}\n  lr: 1e-2\n"
    training = load(tmp_path, merged).spec.training
    assert (training.iterations, training.lr) == (30, 1e-2)


def test_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "aliases expand to more than" in refusal(tmp_path, "\n".join(lines))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SpecError, match="the spec file cannot be read"):
            config.load(path, environ={})


def test_shipped_specs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quick_4xcpu", "quick_4xcpu.yaml", "configs/quick_4xcpu.yaml"):
        assert config.load(Path(name), environ={}).sources["topology.cp"] == "file quick_4xcpu.yaml"


# Writing


def test_written_spec_reads_back_equal(tmp_path: Path) -> None:
    text = "name: 1e-3x\ndata: {kind: text, path: 'on', tokenizer: 1e-3, prompt_column: 'no', response_column: '0o7'}\n"
    overrides = ("tolerances.loss_atol=1e-9", "training.lr=3e22", "data.tokenizer='1e-3'", "training.load_path='null'")
    spec = load(tmp_path, text.replace("tokenizer: 1e-3, ", ""), {}, *overrides).spec
    written = config.write_yaml(spec)
    assert load(tmp_path, written).spec == spec
    assert Spec.model_validate(yaml.safe_load(written)) == spec


_NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)


@given(_NAMES, st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.integers(1, 10**9))
def test_any_value_survives_writing(text: str, number: float, whole: int) -> None:
    value = {"text": text, "number": number, "whole": whole, "list": [text, number, None, True], "deep": {text: whole}}
    written = yamltext.dump(value)
    assert yamltext.value(written) == value
    assert yaml.safe_load(written) == value


def test_written_spec_holds_no_secret(tmp_path: Path) -> None:
    spec = load(tmp_path, None, {"DATASET_PATH": f"https://bot:{SECRET}@host/d.jsonl", "HOME": "/home/x"}).spec
    assert SECRET not in config.write_yaml(spec)


def test_every_field_has_a_description_and_nearest_name() -> None:
    for name, info in fields.all_fields().items():
        if not name.endswith(".kind"):
            assert info.description, name
        assert fields.nearest(name + "s", fields.all_fields()) is not None
