"""Text to token ids: the built-in byte tokenizer, or a Hugging Face tokenizer directory.

Both return, for a chat, the ids and, when only the assistant is to be trained on, a mask by
position: what an id is never decides whether it counts, so an end mark that doubles as padding
is trained on like any other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dcpbench.data.identity import TokenizerIdentity, base_name, check_lfs_pointer, file_sha256
from dcpbench.data.text import Message
from dcpbench.errors import DataError

LossOn = Literal["all", "response"]

# Every file of a tokenizer directory that can change an id or the chat template; weights are none of it.
_FILES = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges.*|chat_template.*"
    r"|additional_chat_templates/.*|config\.json|.*\.(model|tiktoken|jinja)"
)
# Ids of the byte tokenizer behind the 256 bytes.
_BYTE_END = 256
_BYTE_ROLES = {"system": 257, "developer": 257, "user": 258, "assistant": 259, "tool": 260, "function": 260}
_BYTE_VOCABULARY = 261

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """One sample: (n,) int32 token ids, and (n,) bool which of them are trained on (None: all)."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_] | None


class Tokenizer(Protocol):
    """Turns text into ids below `vocab_size`, the same on every machine."""

    @property
    def vocab_size(self) -> int:
        """The smallest number above every id it can give."""

    @property
    def identity(self) -> TokenizerIdentity:
        """Name and hash, for the manifest."""

    def encode_text(self, text: str) -> Encoded:
        """A document with its end mark; every token is trained on.

        Raises:
            ValueError: the text cannot be encoded; says why.
        """

    def encode_messages(self, messages: Sequence[Message], loss_on: LossOn = "all") -> Encoded:
        """A chat; `response` trains on what the assistant says and on the mark that ends it.

        Raises:
            DataError: the tokenizer cannot encode any chat; says how to give it a template.
            ValueError: this chat cannot be encoded or masked; says why.
        """


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        DataError: the directory is missing or holds no usable tokenizer.
    """
    return ByteTokenizer() if name == "byte" else HuggingFaceTokenizer(Path(name))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, an end mark, and one mark before the bytes of each message for its role.

    A document is its bytes and the end mark; a message is its role's mark, its bytes and the end
    mark. Reasoning and tool calls, where a message has them, stand before and after its content.
    """

    @property
    def vocab_size(self) -> int:
        """256 bytes, the end mark and four roles."""
        return _BYTE_VOCABULARY

    @property
    def identity(self) -> TokenizerIdentity:
        """The hash is over the marks: it changes when they do."""
        marks = json.dumps({"end": _BYTE_END, **_BYTE_ROLES}, sort_keys=True)
        return TokenizerIdentity(
            name="byte", sha256=hashlib.sha256(marks.encode()).hexdigest(), vocab_size=self.vocab_size
        )

    def encode_text(self, text: str) -> Encoded:
        """See `Tokenizer`."""
        return Encoded(np.append(_bytes(text), np.int32(_BYTE_END)), None)

    def encode_messages(self, messages: Sequence[Message], loss_on: LossOn = "all") -> Encoded:
        """See `Tokenizer`."""
        ids: list[NDArray[np.int32]] = []
        mask: list[NDArray[np.bool_]] = []
        for message in messages:
            role = message["role"]
            if role not in _BYTE_ROLES:
                raise ValueError(
                    f"the byte tokenizer has no mark for the role {role!r}, only for {', '.join(_BYTE_ROLES)}"
                )
            calls = message.get("tool_calls")
            parts = [message.get("reasoning_content"), message["content"], json.dumps(calls) if calls else None]
            payload = _bytes("\n".join(str(part) for part in parts if part))
            ids += [np.array([_BYTE_ROLES[role]], np.int32), payload, np.array([_BYTE_END], np.int32)]
            mask += [np.zeros(1, np.bool_), np.full(payload.size + 1, role == "assistant")]
        return Encoded(np.concatenate(ids), np.concatenate(mask) if loss_on == "response" else None)


class HuggingFaceTokenizer:
    """A local tokenizer directory, read by `transformers`; chats go through its own chat template."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"data.tokenizer: {folder} is no directory; give `byte`, or a directory with a Hugging Face tokenizer"
            )
        files = sorted(
            p for p in folder.rglob("*") if p.is_file() and _FILES.fullmatch(p.relative_to(folder).as_posix())
        )
        for file in files:
            check_lfs_pointer(file, "data.tokenizer")
        try:
            # Here, and not above: it takes seconds, and `byte` needs none of it.
            from transformers import AutoTokenizer  # noqa: PLC0415
        except ImportError:
            raise DataError(
                "data.tokenizer: a Hugging Face tokenizer needs transformers; pip install 'dcpbench[data]'"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the Rust half of the library raises plain Exception
            raise DataError(f"data.tokenizer: {folder} holds no usable tokenizer: {_first_line(error)}") from None
        self._vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        sha = hashlib.sha256()
        for file in files:
            sha.update(f"{file.relative_to(folder).as_posix()}\0{file_sha256(file)}\n".encode())
        self._identity = TokenizerIdentity(name=base_name(folder), sha256=sha.hexdigest(), vocab_size=self._vocab_size)

    @property
    def vocab_size(self) -> int:
        """One above the greatest id, added tokens included."""
        return self._vocab_size

    @property
    def identity(self) -> TokenizerIdentity:
        """Name of the directory and hash of its tokenizer files."""
        return self._identity

    def encode_text(self, text: str) -> Encoded:
        """See `Tokenizer`. The end mark is the tokenizer's EOS; without one the document just ends."""
        ids = list(self._encode(text, special=True)["input_ids"])
        begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if begin is not None and ids[:2] == [begin, begin]:
            del ids[0]  # the text brought its own BOS
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return Encoded(np.array(ids, dtype=np.int32), None)

    def encode_messages(self, messages: Sequence[Message], loss_on: LossOn = "all") -> Encoded:
        """See `Tokenizer`.

        The ids are those of the rendered template; it writes BOS itself, so no special token is
        added again. The mask comes from the template's `generation` marks, else from where the
        renderings of the chat's prefixes end.
        """
        try:
            template = str(self._tokenizer.get_chat_template())
        except ValueError:
            raise DataError(
                f"data.tokenizer: {self._identity.name} has no chat template; put a chat_template.jinja into its "
                "directory, or name a column of plain text with data.text_column"
            ) from None
        if loss_on == "response" and not self._tokenizer.is_fast:
            raise DataError(
                f"data.tokenizer: {self._identity.name} cannot say which text a token covers, which data.loss_on: "
                "response needs; give it a tokenizer.json, or set data.loss_on: all"
            )
        if loss_on == "response" and _GENERATION.search(template):
            marked = self._template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return Encoded(
                np.array(marked["input_ids"], dtype=np.int32), np.array(marked["assistant_masks"], dtype=np.bool_)
            )
        text = self._render(messages)
        encoding = self._encode(text, special=False, offsets=loss_on == "response")
        ids = np.array(encoding["input_ids"], dtype=np.int32)
        if loss_on == "all":
            return Encoded(ids, None)
        return Encoded(ids, _covered(encoding["offset_mapping"], self._response_spans(messages, text)))

    def _encode(self, text: str, *, special: bool, offsets: bool = False) -> Any:
        try:
            # Explicit, because a saved tokenizer may carry a truncation of its own.
            return self._tokenizer(
                text,
                add_special_tokens=special,
                return_offsets_mapping=offsets,
                truncation=False,
                padding=False,
                verbose=False,
            )
        except Exception as error:  # the Rust half of the library raises plain Exception
            raise ValueError(f"the tokenizer {self._identity.name} refuses the text: {_first_line(error)}") from None

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return str(self._template(messages, tokenize=False, add_generation_prompt=prompt)) if messages else ""

    def _template(self, messages: Sequence[Message], **options: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # a template may raise anything, from TemplateError to TypeError
            raise ValueError(f"the chat template of {self._identity.name} refuses it: {_first_line(error)}") from None

    def _response_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """Character ranges of `text` that the assistant says, its end marks included."""
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:turn])
            asked = self._render(messages[:turn], prompt=True)
            answered = self._render(messages[: turn + 1])
            # Without a generation prompt the answer itself must come next, or a header would be trained on.
            bare = asked == before and not text[len(asked) :].lstrip().startswith(message["content"].strip())
            if bare or not (text.startswith(asked) and text.startswith(answered) and len(asked) < len(answered)):
                raise ValueError(
                    f"message {turn + 1}: the chat template of {self._identity.name} does not show where the answer "
                    "begins and ends; add `generation` marks to it, or set data.loss_on: all"
                )
            spans.append((len(asked), _end_of_answer(answered, len(asked), message["content"])))
        return spans


def _end_of_answer(answered: str, start: int, content: str) -> int:
    """Where the answer's end mark ends: layout that a template puts behind it is not the assistant's."""
    found = answered.rfind(content, start) if content else -1
    tail = found + len(content) if found >= 0 else start
    end = tail + len(answered[tail:].rstrip())
    return end if end > start else len(answered)


def _covered(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens hold a character of some span, or stand inside one without covering any."""
    mask = np.zeros(len(offsets), dtype=np.bool_)
    begins = np.array([begin for begin, _ in offsets], dtype=np.int64)
    ends = np.array([max(end, begin + 1) for begin, end in offsets], dtype=np.int64)
    for start, stop in spans:
        mask |= (begins < stop) & (ends > start)
    return mask


def _bytes(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
