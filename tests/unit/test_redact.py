"""Redaction: every known form is found before and gone after, and ordinary output stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench import redact as redact_module
from dcpbench.provenance import secretscan
from dcpbench.redact import MARK, LineRedactor, allowed_environment, is_secret_name, learn, redact, redact_value, scan

# Put together here so that no scanner takes this file for a leak.
_LETTERS = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7"
_HEX = "0123456789abcdef"
PLANTED: dict[str, tuple[str, str]] = {
    # kind -> (secret, text that holds it)
    "Hugging Face token": (s := "hf_" + _LETTERS + "xyzab", f"login with {s} failed"),
    "GitHub token": (s := "ghp_" + _LETTERS + "abcdefg", f"remote: {s}"),
    "GitHub fine-grained token": (s := "github_pat_11AAAA_" + _LETTERS, f"using {s}."),
    "GitLab token": (s := "glpat-" + _LETTERS[:20], f"({s})"),
    "sk- key": (s := "sk-" + "proj-" + _LETTERS, f"openai said: {s}"),
    "Stripe key": (s := "sk_live_" + _LETTERS, f"pay with {s}"),
    "AWS access key": (s := "AKIA" + "IOSFODNN7EXAMPL2", f"id {s} used"),
    "Slack token": (s := "xoxb-" + "123456789012-" + _LETTERS, f"slack {s}"),
    "Slack webhook": (s := "services/T00000000/B00000000/" + _LETTERS, f"https://hooks.slack.com/{s}"),
    "Google key": (s := "AIza" + _LETTERS + "abcdefgh", f"maps {s}"),
    "NVIDIA key": (s := "nvapi-" + _LETTERS, f"ngc {s}"),
    "PyPI token": (s := "pypi-" + _LETTERS * 2, f"upload {s}"),
    "npm token": (s := "npm_" + _LETTERS + "abcdefghi", f"npm {s}"),
    "W&B key": (s := "wandb_v1_" + _LETTERS, f"login {s}"),
    "old W&B key": (s := _HEX * 2 + _HEX[:8], f"wandb: API key is {s}"),
    "JSON web token": (s := "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2", f"cookie jar {s}"),
    "bearer token": (s := "abcdef0123456789.xyz", f"sent Bearer {s}"),
    "authorization header": (s := "dXNlcjpwYXNz", f"Authorization: Basic {s}"),
    "curl credential": (s := "hunter2x", f"curl -u alice:{s} https://host/"),
    "netrc password": (s := "hunter3x", f"machine host login alice password {s}"),
    "private key": (
        s := "MIIEowIBAAKCAQEA" + _LETTERS,
        f"-----BEGIN RSA PRIVATE KEY-----\n{s}\n-----END RSA PRIVATE KEY-----\n",
    ),
    "private key without its end": (s := "MIIEowIBAAKCAQEB" + _LETTERS, f"-----BEGIN PRIVATE KEY-----\n{s}\n"),
    "private key in JSON": (
        s := "MIIEowIBAAKCAQEC" + _LETTERS,
        json.dumps({"pem": f"-----BEGIN PRIVATE KEY-----\n{s}\n-----END PRIVATE KEY-----\n"}),
    ),
    "URL with user and token": (s := "tok1tok2", f"origin https://bot:{s}@host/a/b.git"),
    "URL with a token alone": (s := "tok3tok4", f"https://{s}@host/a/b.git"),
    "URL with a slash in the password": (s := "pa/ss5", f"postgres://user:{s}@host/base"),
    "URL read as a path": (s := "tok6tok7", str(Path(f"https://bot:{s}@host/a.jsonl"))),
    "URL query": (s := "tok8tok9", f"https://host/x.jsonl?access_token={s}&page=2"),
    "signed URL": (s := "c2lnbmF0dXJl", f"https://host/x.jsonl?X-Amz-Signature={s}&page=2"),
    "variable": (s := "plainvalue1", f"export MY_API_KEY={s}"),
    "variable in quotes": (s := "plain value 2", f"export DB_PASSWORD='{s}'"),
    "camel case": (s := "plainvalue3", f"dbPassword: {s}"),
    "JSON member": (s := 'plain"value4', json.dumps({"hf_token": s, "other": 1})),
    "JSON inside JSON": (s := "plainvalue5", json.dumps({"body": json.dumps({"secret": s}), "other": 1})),
    "YAML": (s := "plainvalue6", f"data:\n  auth_token: {s}\n"),
    "option": (s := "plainvalue7", f"run --hf-token {s} --verbose"),
    "option with equals sign": (s := "plainvalue8", f"run --hf-token={s} --verbose"),
    "option in a printed list": (s := "plainvalue9", f"['run', '--api-key', '{s}']"),
    "option in JSON": (s := "plainvalue0", json.dumps(["run", "--api-key", s])),
    "numeric password": (s := "73190462", f"password={s}"),
}


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secretscan, "_learned", set())


def _appears(secret: str, text: str) -> bool:
    """A plain search, also for the form in which JSON writes the secret."""
    return secret in text or json.dumps(secret)[1:-1] in text


@pytest.mark.parametrize("kind", PLANTED)
def test_a61_every_known_shape_is_found_before_and_not_after(kind: str) -> None:
    secret, text = PLANTED[kind]
    assert _appears(secret, text)
    assert scan(text)
    clean = redact(text)
    assert not _appears(secret, clean)
    assert not scan(clean)
    assert redact(clean) == clean


def test_a61_every_pattern_has_a_planted_example() -> None:
    matched = {
        name
        for name, shape in secretscan.SHAPES.items()
        if any(shape.pattern.search(text) for _, text in PLANTED.values())
    }
    assert matched == set(secretscan.SHAPES)


def test_a61_every_match_holds_a_hint() -> None:
    for name, shape in secretscan.SHAPES.items():
        for _, text in PLANTED.values():
            for match in shape.pattern.finditer(text):
                assert any(hint in match[0].lower() for hint in shape.hints), name


def test_bytes_that_are_no_text() -> None:
    for kind in ("Hugging Face token", "URL with user and token", "private key"):
        assert secretscan.kinds_in_bytes(b"\x00\xff" + PLANTED[kind][1].encode() + b"\x00")
    assert not secretscan.kinds_in_bytes(bytes(range(256)) * 10)


def test_a61_over_a_whole_folder(tmp_path: Path) -> None:
    for number, (_, text) in enumerate(PLANTED.values()):
        (tmp_path / f"{number}.log").write_text(text)
    for file in tmp_path.iterdir():
        assert scan(file.read_text())
        file.write_text(redact(file.read_text()))
    everything = "\n".join(file.read_text() for file in tmp_path.iterdir())
    assert [secret for secret, _ in PLANTED.values() if _appears(secret, everything)] == []


def test_a59_token_in_git_remote() -> None:
    assert redact("https://bot:TOKEN@host/a/b.git") == "https://host/a/b.git"
    assert redact("git@host:a/b.git") == "git@host:a/b.git"
    assert redact("ssh://git@host/a/b.git") == "ssh://git@host/a/b.git"


@pytest.mark.parametrize(
    "text", ["--hf-token TOKEN", "--hf-token=TOKEN", "x --hf-token 'TOKEN' y", "--hf-token\tTOKEN"]
)
def test_a60_token_on_the_command_line(text: str) -> None:
    clean = redact(text)
    assert "TOKEN" not in clean
    assert "--hf-token" in clean


def test_a60_argument_lists() -> None:
    argv = ["train", "--hf-token", "TOKEN", "--hf-token=TOKEN", "--use-auth", "--lr", "0.1"]
    assert redact_value(argv) == [
        "train", "--hf-token", MARK, f"--hf-token={MARK}", "--use-auth", "--lr", "0.1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "dcpbench iteration 3/40 | consumed samples 96 | loss 1.25 | tokens 1234 | loss tokens 1230 | digest 0a1b2c |",
        '{"flops_per_token": 123.5, "tokens": 12, "token_count": 3, "tokens_per_second": 4.5}',
        "commit d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1 of https://github.com/a/b/pull/5",
        "tokenizer: byte\ndata:\n  kind: text\n  tokens: zipf\n",
        "vocab 257, pad_token: <pad>, eos_token=</s>, key 5 of 7",
        "--calculate-per-token-loss --tokenizer-type NullTokenizer --null-tokenizer-pad-id 0",
        "http://127.0.0.1:29500/path and http://host:8080/@scope/pkg",
        "task-specific risk-based /srv/data/root/x /rootfs root model data",
        "2026-11-30 15:14:02.118 [default0]: step 1: 12.3 ms",
        "token: null, secret: true, password:",
    ],
)
def test_ordinary_output_stays(text: str) -> None:
    assert redact(text) == text
    assert scan(text) == []


def test_environment_values_are_removed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "opaque words/1234")
    monkeypatch.setenv("INDEX_URL", "https://bot:opaque5678@host/simple")
    for text in ("got opaque words/1234.", "x=opaque%20words%2F1234", "bad password opaque5678"):
        assert "opaque" not in redact(text), text
    monkeypatch.setenv("MY_SERVICE_TOKEN", "no")
    assert redact("no, nothing") == "no, nothing"


def test_learned_values_are_removed_when_alone() -> None:
    text = "TOKEN99x refused for bot"
    assert redact(text) == text
    learn("git clone https://bot:TOKEN99x@host/a.git --api-key other88y")
    assert redact(text) == f"{MARK} refused for bot"
    assert "other88y" not in redact("retry other88y")


def test_home_user_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice.w")
    monkeypatch.setenv("USER", "alice.w")
    monkeypatch.setenv("LOGNAME", "alice.w")
    monkeypatch.setenv("HOSTNAME", "gpu-17.cluster.example")
    text = "/home/alice.w/x -I/home/alice.w/i /home/bob/y /root/z /scratch/alice.w/q file:///root/a gpu-17:29500 ~/k"
    assert redact(text) == ("~/x -I~/i /home/[user]/y ~/z /scratch/[user]/q file://~/a [host]:29500 ~/k")
    assert "cluster" not in redact("on gpu-17.cluster.example now")
    assert redact(text, identity=False) == text
    assert {finding.kind for finding in scan(text)} == {"home directory", "host name", "user name"}


@pytest.mark.parametrize("user", ["root", "model", "data", "mark", "x"])
def test_user_names_that_are_words_do_not_mangle_output(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, user)
    text = "root model data mark x: the benchmark's data model"
    assert redact(text) == text


def test_short_user_name_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "mark")
    assert redact("/scratch/mark/run mark@host benchmark mark") == "/scratch/[user]/run [user]@host benchmark mark"


def test_nested_values_keep_their_structure() -> None:
    value = {
        "hf_token": "abc",
        "api_key": {"a": ["b", 1]},
        "flops_per_token": 1.5,
        "pad_token": "<pad>",
        "path": Path("/home/carol/x"),
        "list": ("https://u:p@h/x", None, True, 3),
        1: {"empty_secret": ""},
    }
    clean = redact_value(value)
    assert clean == {
        "hf_token": MARK,
        "api_key": {"a": [MARK, 1]},
        "flops_per_token": 1.5,
        "pad_token": "<pad>",
        "path": "/home/[user]/x",
        "list": ["https://h/x", None, True, 3],
        "1": {"empty_secret": ""},
    }
    assert redact_value(clean) == clean


def test_redacted_json_stays_json() -> None:
    value = {"cmd": "run --password=a\"b' c", "password": 'x\\"y', "url": "https://u:p\\q@h/", "z": ["token=abc"]}
    clean = json.loads(redact(json.dumps(value)))
    assert set(clean) == set(value)
    assert clean["z"] == [f"token={MARK}"]


def test_private_key_over_several_lines() -> None:
    body = "MIIE" + _LETTERS
    lines = ["before\n", "-----BEGIN PRIVATE KEY-----\n", body + "\n", "-----END PRIVATE KEY-----\n", "a 1/2 | b |\n"]
    redactor = LineRedactor()
    assert "".join(map(redactor, lines)) == f"before\n{MARK}\n\n\na 1/2 | b |\n"


def test_unfinished_private_key_does_not_swallow_the_log() -> None:
    redactor = LineRedactor()
    lines = ["-----BEGIN PRIVATE KEY-----\n", "MIIEabcd\n", "dcpbench iteration 1/2 | loss 1.5 |\n"]
    assert [redactor(line) for line in lines][-1] == lines[-1]


def test_allowed_environment() -> None:
    token = PLANTED["Hugging Face token"][0]
    environ = {
        "NCCL_DEBUG": "INFO",
        "NVTE_FLASH_ATTN": "1",
        "OMP_NUM_THREADS": "4",
        "TORCH_HOME": "/home/dora/.cache",
        "NCCL_AUTH_TOKEN": "abc",
        "CUDA_NOTE": token,
        "PATH": "/bin",
        "HF_TOKEN": token,
        "AWS_SECRET_ACCESS_KEY": "abc",
        "DATASET_PATH": "https://u:p@h/x",
    }
    assert allowed_environment(environ) == {
        "NCCL_DEBUG": "INFO",
        "NVTE_FLASH_ATTN": "1",
        "OMP_NUM_THREADS": "4",
        "TORCH_HOME": "/home/[user]/.cache",
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("--hf-token", True), ("apiKey", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("WANDB_KEY", True),
        ("GITLAB_PAT", True), ("data.password", True), ("PATH", False), ("TOKENIZER_MODEL", False), ("tokens", False),
        ("flops_per_token", False), ("eos_token", False), ("key", False), ("SSH_AUTH_SOCK", False), ("monkey", False),
    ],
)  # fmt: skip
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


_PIECES = st.sampled_from(
    [*(text for _, text in PLANTED.values()), MARK, "token", "=", ":", " ", '"', "'", "\\", "@", "//", "--", "\n", "&"]
)


@given(st.lists(_PIECES | st.text(max_size=6), max_size=8).map("".join))
def test_redaction_is_idempotent_and_agrees_with_the_scan(text: str) -> None:
    clean = redact(text)
    assert redact(clean) == clean
    assert scan(clean) == []
    assert bool(scan(text)) == (clean != text)


def test_findings_never_hold_the_secret() -> None:
    secret, text = PLANTED["GitHub token"]
    assert secret not in repr(scan("\n\n" + text))
    assert scan("\n\n" + text)[0].line == 3


def test_account_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> None:
        raise KeyError

    redact_module._account.cache_clear()
    monkeypatch.setattr("pwd.getpwuid", missing)
    assert redact("plain text") == "plain text"
    redact_module._account.cache_clear()


def test_working_directory_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells export it as PWD; its path must stay readable in commands and messages."""
    monkeypatch.setenv("PWD", "/data/experiments")
    assert redact("see /data/experiments/runs/a") == "see /data/experiments/runs/a"
