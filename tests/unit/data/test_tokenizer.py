import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from dcpbench.errors import DataError

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", ":", "a", "b", "c", "d", "<|im_start|>", "<|im_end|>"]
CHAT = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "d"},
]
HEADED = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ' : ' + m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }} : {% endif %}{% endfor %}"
)


def build(folder: Path, template: str | None = HEADED, *, ids: str = "words", **options: Any) -> Path:
    """A tiny tokenizer directory whose post-processor adds BOS, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if ids == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: index for index, symbol in enumerate(dict.fromkeys([*WORDS, *alphabet]))}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"} | options
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **{key: value for key, value in marks.items() if value is not None},
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def words(tokenizer: HuggingFaceTokenizer, messages: Any, loss_on: Any = "response") -> list[str]:
    """The tokens of a chat that are trained on, as words."""
    ids, mask = tokenizer.encode_messages(messages, loss_on)
    assert mask is not None
    assert mask.shape == ids.shape
    return [WORDS[i] for i in ids[mask]]


def test_bytes_of_a_document() -> None:
    ids, mask = ByteTokenizer().encode_text("aé\n")
    assert ids.tolist() == [0x61, 0xC3, 0xA9, 0x0A, 256]
    assert mask is None


def test_bytes_of_a_chat() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    ids, mask = ByteTokenizer().encode_messages(messages, "response")
    assert ids.tolist() == [257, 256, 258, ord("q"), 256, 259, ord("a"), 256]
    assert mask is not None
    assert mask.tolist() == [False] * 6 + [True] * 2
    assert ByteTokenizer().encode_messages(messages).mask is None
    assert ids.max() < ByteTokenizer().vocab_size


def test_bytes_keep_reasoning_and_tool_calls() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [call]}
    ids, _ = ByteTokenizer().encode_messages([message])
    assert bytes(ids[1:-1].astype("u1").tolist()).decode() == "think\n" + json.dumps([call])


def test_bytes_unknown_role() -> None:
    with pytest.raises(ValueError, match="no mark for the role 'critic'"):
        ByteTokenizer().encode_messages([{"role": "critic", "content": "x"}])


def test_byte_identity_is_stable() -> None:
    assert load_tokenizer("byte").identity == ByteTokenizer().identity
    assert ByteTokenizer().identity.name == "byte"


def test_directory_documents(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(build(tmp_path / "tok")))
    assert tokenizer.encode_text("a b").ids.tolist() == [1, 6, 7, 2]
    assert tokenizer.encode_text("<s> a b </s>").ids.tolist() == [1, 6, 7, 2]
    assert tokenizer.vocab_size == len(WORDS)


def test_identity_has_no_directory_and_follows_the_files(tmp_path: Path) -> None:
    first = HuggingFaceTokenizer(build(tmp_path / "one" / "tok")).identity
    same = HuggingFaceTokenizer(build(tmp_path / "two" / "tok")).identity
    other = HuggingFaceTokenizer(build(tmp_path / "three" / "tok", CHATML)).identity
    assert first == same
    assert first.name == "tok"
    assert first.sha256 != other.sha256
    weights = tmp_path / "one" / "tok" / "model.safetensors"
    weights.write_bytes(b"weights")
    assert HuggingFaceTokenizer(tmp_path / "one" / "tok").identity == first


def test_a75_exactly_one_bos(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = build(tmp_path / "tok")
    ids = HuggingFaceTokenizer(folder).encode_messages(CHAT).ids.tolist()
    assert ids.count(1) == 1
    assert ids[0] == 1
    direct = AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, return_dict=True)
    assert ids == list(direct["input_ids"])


def test_a76_the_length_is_that_of_the_ids(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, _ = HuggingFaceTokenizer(build(tmp_path / "tok")).encode_messages(chat)
    assert len(ids) == 9


def test_a77_end_marks_count_although_padding_has_their_id(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok"))
    assert words(tokenizer, CHAT) == ["c", "d", "</s>", "d", "</s>"]


def test_a77_without_pad_or_end_mark(tmp_path: Path) -> None:
    template = HEADED.replace("{{ eos_token }}", " ")
    folder = build(tmp_path / "tok", template, pad_token=None, eos_token=None)
    tokenizer = HuggingFaceTokenizer(folder)
    assert words(tokenizer, CHAT) == ["c", "d", "d"]
    assert tokenizer.encode_text("a b").ids.tolist() == [1, 6, 7]


def test_a78_no_chat_template(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok", None))
    with pytest.raises(DataError, match=r"tok has no chat template; put a chat_template\.jinja into"):
        tokenizer.encode_messages(CHAT)
    assert tokenizer.encode_text("a").ids.tolist() == [1, 6, 2]


def test_layout_behind_the_end_mark_is_not_trained_on(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok", CHATML, ids="bytes"))
    chat = [
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "né \n"},
        {"role": "user", "content": "x"},
    ]
    ids, mask = tokenizer.encode_messages(chat, "response")
    assert mask is not None
    trained = tokenizer._tokenizer.decode(ids[mask])
    assert trained == "né \n<|im_end|>"
    assert tokenizer._tokenizer.decode(ids).endswith("né \n<|im_end|>\n<|im_start|>user\nx<|im_end|>\n")


def test_generation_marks_of_the_template(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok", GENERATION))
    assert words(tokenizer, CHAT) == ["c", "d", "</s>", "d", "</s>"]


def test_template_without_generation_prompt(tmp_path: Path) -> None:
    """Llama-2 style: nothing stands between the question and the answer."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% else %} : {% endif %}{% endfor %}"
    )
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok", template))
    assert words(tokenizer, CHAT) == ["c", "d", "</s>", "d", "</s>"]


@pytest.mark.parametrize(
    "template",
    [
        # A header that no generation prompt tells apart from the answer.
        "{% for m in messages %}{{ m.role + ' : ' + m.content }}{{ eos_token }}{% endfor %}",
        # Earlier answers are rewritten once another turn follows, as reasoning templates do.
        "{% for m in messages %}{{ m.role }} : {{ m.content if loop.last or m.role == 'user' else 'c' }} {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}",
        # A generation prompt that the rendered answer does not have.
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}",
    ],
)
def test_templates_that_hide_the_answer_are_refused(tmp_path: Path, template: str) -> None:
    tokenizer = HuggingFaceTokenizer(build(tmp_path / "tok", template))
    with pytest.raises(ValueError, match="message 2: the chat template of tok does not show where the answer begins"):
        tokenizer.encode_messages(CHAT, "response")
    assert tokenizer.encode_messages(CHAT).ids.size > 4


def test_template_that_raises(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="the chat template of tok refuses it: roles must alternate"):
        HuggingFaceTokenizer(build(tmp_path / "tok", template)).encode_messages(CHAT)


def test_a73_template_may_test_lists(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.name }} {% endfor %}"
        "{% endif %}{% endfor %}"
    )
    message = {"role": "assistant", "content": "", "tool_calls": [{"name": "a"}, {"name": "b"}]}
    ids, _ = HuggingFaceTokenizer(build(tmp_path / "tok", template)).encode_messages([message])
    assert ids.tolist() == [6, 7]


def test_a79_a_saved_truncation_has_no_effect(tmp_path: Path) -> None:
    folder = build(tmp_path / "tok", model_max_length=4)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.encode_text("a b " * 50).ids.size == 102
    assert tokenizer.encode_messages([{"role": "user", "content": "a b " * 50}]).ids.size == 104


def test_directories_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: .*none is no directory; give `byte`"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.tokenizer: .*empty holds no usable tokenizer: \w+") as caught:
        load_tokenizer(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)
    folder = build(tmp_path / "torn")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="torn holds no usable tokenizer"):
        load_tokenizer(str(folder))
    folder = build(tmp_path / "pointer")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(DataError, match="this is a Git LFS pointer; fetch the object"):
        load_tokenizer(str(folder))
