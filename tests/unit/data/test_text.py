import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench.data.rows import Row
from dcpbench.data.text import Chat, Columns, Document, choose_columns, parse_row
from dcpbench.errors import DataError
from dcpbench.spec import TextData

DATA = TextData(path=Path("set.jsonl"))
MESSAGES = Columns("messages", ("messages",))


def chat(messages: Any) -> tuple[dict[str, Any], ...]:
    result = parse_row(Row("set.jsonl, line 3", {"messages": messages}), MESSAGES)
    assert isinstance(result, Chat)
    return result.messages


@pytest.mark.parametrize(
    ("present", "form", "names"),
    [
        (["id", "text", "messages"], "messages", ("messages",)),
        (["conversations", "prompt", "response"], "messages", ("conversations",)),
        (["answer", "question"], "pair", ("question", "answer")),
        (["text", "prompt", "completion"], "pair", ("prompt", "completion")),
        (["instruction", "input", "output"], "pair", ("instruction", "output")),
        (["question", "text"], "text", ("text",)),
    ],
)
def test_columns_by_name(present: list[str], form: str, names: tuple[str, ...]) -> None:
    columns = choose_columns(DATA, present)
    assert (columns.form, columns.names) == (form, names)


def test_named_columns_win() -> None:
    present = ["messages", "text", "q", "a"]
    pair = TextData(path=Path("s.jsonl"), prompt_column="q", response_column="a")
    assert choose_columns(pair, present) == Columns("pair", ("q", "a"))
    assert choose_columns(TextData(path=Path("s.jsonl"), text_column="text"), present) == Columns("text", ("text",))
    assert choose_columns(TextData(path=Path("s.jsonl"), messages_column="q"), present) == Columns("messages", ("q",))


def test_unknown_columns_are_listed() -> None:
    with pytest.raises(DataError, match=r"'id', 'body'; set data\.messages_column"):
        choose_columns(DATA, ["id", "body"])
    with pytest.raises(DataError, match="no column 'body'; it has 'id', 'text'"):
        choose_columns(TextData(path=Path("s.jsonl"), text_column="body"), ["id", "text"])


def test_pair_becomes_a_chat() -> None:
    columns = choose_columns(DATA, ["instruction", "output"])
    plain = parse_row(Row("x", {"instruction": "Add.", "output": "3"}), columns)
    assert plain == Chat(({"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}))
    empty = parse_row(Row("x", {"instruction": "Add.", "input": "", "output": "3"}), columns)
    assert empty == plain


def test_context_follows_the_prompt_even_when_the_first_record_has_none() -> None:
    columns = choose_columns(DATA, ["instruction", "output"])
    result = parse_row(Row("x", {"instruction": "Add.", "context": "1, 2", "output": "3"}), columns)
    assert isinstance(result, Chat)
    assert result.messages[0]["content"] == "Add.\n\n1, 2"


def test_text_becomes_a_document() -> None:
    assert parse_row(Row("x", {"text": "a\u0085b"}), Columns("text", ("text",))) == Document("a\u0085b")


def test_sharegpt_speakers() -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert [m["role"] for m in chat(turns)] == ["system", "user", "assistant"]
    assert [m["content"] for m in chat(turns)] == ["s", "q", "a"]
    with pytest.raises(DataError, match="line 3, message 1: the speaker 'narrator' is unknown"):
        chat([{"from": "narrator", "value": "x"}])


def test_a71_content_as_text_or_parts() -> None:
    plain = chat([{"role": "user", "content": "one two"}])
    parts = chat([{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}])
    assert plain == parts
    with pytest.raises(DataError, match="message 1: content has a part of type 'image' that is not text"):
        chat([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


def test_a74_null_fields_are_absent_fields() -> None:
    with_null = {"role": "assistant", "content": "x", "tool_calls": None, "name": None}
    assert chat([with_null]) == chat([{"role": "assistant", "content": "x"}])
    call = {"function": {"name": "f", "arguments": "{}"}}
    padded = {"id": None, "function": {"name": "f", "arguments": "{}", "strict": None}}
    assert chat([{"role": "assistant", "content": None, "tool_calls": [padded]}]) == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )


def test_a74_messages_as_json_text() -> None:
    messages = [{"role": "user", "content": "q"}]
    assert chat(json.dumps(messages)) == chat(messages)
    with pytest.raises(DataError, match="line 3: the messages are a string that is not JSON"):
        chat("hello")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "the messages are no list"),
        ([], "the text of the messages is empty"),
        ([{"role": "user", "content": ""}], "the text of the messages is empty"),
        (["hi"], "message 1: no object"),
        ([{"content": "x"}], "message 1: no role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 7}], "message 2: content is of type int"),
        ([{"role": "user", "content": "\ud83d"}], r"half of a surrogate pair \(\\ud83d\)"),
    ],
)
def test_messages_that_cannot_be_used(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^set.jsonl, line 3.*{message}"):
        chat(messages)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "q"}, "line 9: no column 'response'"),
        ({"prompt": "q", "response": None}, "line 9: response is null, not text"),
        ({"prompt": "q", "response": 42}, "line 9: response is of type int, not text"),
        ({"prompt": "", "response": ""}, "line 9: the text of prompt and response is empty"),
    ],
)
def test_pairs_that_cannot_be_used(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_row(Row("set.jsonl, line 9", values), Columns("pair", ("prompt", "response")))
