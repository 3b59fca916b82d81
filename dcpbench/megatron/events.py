"""Scalars from TensorBoard event files, read without TensorBoard.

A file is a sequence of records: length (8 bytes, little-endian), its checksum (4), the event, its
checksum (4). An event is a protocol-buffers message: field 2 is the step, field 5 the summary, whose
field 1 repeats values with a tag (1) and a simple value (2, float32). Format: TensorFlow's
`record_writer` and `event.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_EVENT = 1 << 26


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value of one tag in every event file of a folder; of a repeated step, the last value.

    What is torn or not understood ends the reading of its file: these values are a second source.
    """
    found: dict[int, float] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []:
        try:
            content = path.read_bytes()
        except OSError:
            continue
        for event in _events(content):
            try:
                step, values = _event(event, tag.encode())
            except (ValueError, IndexError, struct.error):
                break
            for value in values:
                found[step] = value
    return found


def _events(content: bytes) -> Iterator[bytes]:
    place = 0
    while place + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        stop = place + 12 + length
        if length > _LONGEST_EVENT or stop + 4 > len(content):
            return
        yield content[place + 12 : stop]
        place = stop + 4


def _event(message: bytes, tag: bytes) -> tuple[int, list[float]]:
    step, values = 0, []
    for number, kind, value in _fields(message):
        if number == 2 and kind == _VARINT:
            step = int.from_bytes(value, "little")
        elif number == 5 and kind == _BYTES:
            for inner, inner_kind, summary in _fields(value):
                if inner == 1 and inner_kind == _BYTES:
                    values += _value(summary, tag)
    return step, values


def _value(message: bytes, tag: bytes) -> list[float]:
    parts = {number: value for number, kind, value in _fields(message) if kind in {_BYTES, _FIXED32}}
    if parts.get(1) != tag or len(parts.get(2, b"")) != 4:
        return []
    return [float(struct.unpack("<f", parts[2])[0])]


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(field number, wire type, content) of each field; numbers as little-endian bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            integer, place = _varint(message, place)
            yield number, kind, integer.to_bytes(10, "little")
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in {_FIXED64, _FIXED32}:
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > len(message):
            raise ValueError("a field is longer than its message")
        yield number, kind, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
