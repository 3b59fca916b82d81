"""Rows of text as chats and documents: which columns hold the text, and what a row must look like.

A row becomes a chat (messages, or a prompt and its response) or a document (plain text). Nothing
is dropped in silence: a row that cannot be used is refused with its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dcpbench.data.rows import Row, parse_json
from dcpbench.errors import DataError
from dcpbench.spec import TextData

PROMPTS = ("instruction", "prompt", "query", "question")
RESPONSES = ("output", "response", "completion", "answer")
CONTEXTS = ("input", "context")

# Speakers of the ShareGPT form (`from`, `value`) and the roles they stand for.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

Message = dict[str, Any]
"""`role` and `content` (both strings), and whatever else the row gave that is not null."""


@dataclass(frozen=True)
class Chat:
    """A conversation, in order."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Document:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Columns:
    """Where a row's text is: one column of messages or text, or a prompt and a response."""

    form: Literal["messages", "pair", "text"]
    names: tuple[str, ...]
    contexts: tuple[str, ...] = ()
    """Columns that a row may have; the first that is not empty is appended to the prompt."""


def choose_columns(data: TextData, present: Sequence[str]) -> Columns:
    """The columns that the spec names, else the first form that the file has.

    The order is messages, conversations, a prompt with a response, text. A context column is
    appended to the prompt after a blank line.

    Raises:
        DataError: a named column is missing, or no known column is there; lists those that are.
    """
    if data.messages_column is not None:
        chosen = Columns("messages", (data.messages_column,))
    elif data.prompt_column is not None and data.response_column is not None:
        chosen = Columns("pair", (data.prompt_column, data.response_column))
    elif data.text_column is not None:
        chosen = Columns("text", (data.text_column,))
    else:
        return _first_match(present)
    for name in chosen.names:
        if name not in present:
            raise DataError(f"data.path: {data.path.name} has no column {name!r}; it has {_listed(present)}")
    return chosen


def _first_match(present: Sequence[str]) -> Columns:
    for name in ("messages", "conversations"):
        if name in present:
            return Columns("messages", (name,))
    prompt = next((name for name in PROMPTS if name in present), None)
    response = next((name for name in RESPONSES if name in present), None)
    if prompt is not None and response is not None:
        return Columns("pair", (prompt, response), CONTEXTS)
    if "text" in present:
        return Columns("text", ("text",))
    raise DataError(
        f"data.path: no column of text is known by its name among {_listed(present)}; set data.messages_column, "
        "data.prompt_column with data.response_column, or data.text_column"
    )


def parse_row(row: Row, columns: Columns) -> Chat | Document:
    """The chat or document of one row.

    Raises:
        DataError: the row lacks a column, or its value is no text or chat, or empty; names its place.
    """
    for name in columns.names:
        if name not in row.values:
            raise DataError(f"{row.place}: no column {name!r}")
    if columns.form == "messages":
        return Chat(_messages(row.values[columns.names[0]], row.place))
    texts = [_text(row.values[name], row.place, name) for name in columns.names]
    if not any(texts):
        raise DataError(f"{row.place}: the text of {' and '.join(columns.names)} is empty")
    if columns.form == "text":
        return Document(texts[0])
    context = next((name for name in columns.contexts if row.values.get(name)), None)
    prompt = texts[0] if context is None else f"{texts[0]}\n\n{_text(row.values[context], row.place, context)}"
    return Chat(({"role": "user", "content": prompt}, {"role": "assistant", "content": texts[1]}))


def _messages(value: Any, place: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        # Some sets keep the whole conversation as JSON text in a string column.
        try:
            value = parse_json(value)
        except ValueError as error:
            raise DataError(f"{place}: the messages are a string that is not JSON: {error}") from None
    if not isinstance(value, list):
        raise DataError(f"{place}: the messages are no list")
    messages = tuple(_message(turn, f"{place}, message {number}") for number, turn in enumerate(value, start=1))
    if not any(message.get(field) for message in messages for field in ("content", "reasoning_content", "tool_calls")):
        raise DataError(f"{place}: the text of the messages is empty")
    return messages


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{place}: no object with role and content")
    # Parquet gives every message the fields of all, so null and absent have to mean the same.
    fields: Message = {key: _without_nulls(value) for key, value in turn.items() if value is not None}
    role = fields.pop("role", None)
    if role is None and "from" in fields:
        speaker = fields.pop("from")
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise DataError(f"{place}: the speaker {speaker!r} is unknown; known are {', '.join(_SPEAKERS)}")
        fields["content"] = fields.pop("value", None)
    if not isinstance(role, str):
        raise DataError(f"{place}: no role")
    content = fields.pop("content", None)
    return {"role": role, "content": "" if content is None else _text(content, place, "content"), **fields}


def _text(value: Any, place: str, name: str) -> str:
    if isinstance(value, list):
        return "".join(_part(part, place, name) for part in value)
    if not isinstance(value, str):
        raise DataError(
            f"{place}: {name} is {'null' if value is None else 'of type ' + type(value).__name__}, not text"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise DataError(
                f"{place}: {name} holds half of a surrogate pair (\\u{code:04x}), which is no text"
            ) from None
    return value


def _part(part: Any, place: str, name: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
        part = part["text"]
    if not isinstance(part, str):
        kind = f" of type {part['type']!r}" if isinstance(part, dict) and "type" in part else ""
        raise DataError(f"{place}: {name} has a part{kind} that is not text; only text can be trained on")
    return _text(part, place, name)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return (shown or "no column") + (f" and {len(names) - 20} more" if len(names) > 20 else "")
