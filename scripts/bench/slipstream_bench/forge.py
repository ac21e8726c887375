"""The forge of the messages that `scripts/bench/fuzz.py` sends: wrong requests, and real traffic that is
damaged.

Requests are made from their own types, so nothing here knows a single message. Everything comes from one
seeded generator of random numbers.
"""

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

EXTREMES = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 1e-320, 1e308, 3.5e38, 1e10]
DEPTHS = (10, 100, 1_000, 10_000, 60_000)
OPENINGS = (b"\x91", b"\x81\xa1a", b"\x81\x01", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01")
"""Beginnings of a list or a map with one element, in MessagePack."""
CLAIMS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
)
"""A list, a map, a text, bytes and an extension that claim 2^32 - 1 elements, in MessagePack."""


class Forge:
    """Makes right and wrong requests of a union of msgspec structs."""

    def __init__(self, union: Any, rng: random.Random, names: list[str]) -> None:
        """`names` are the texts of right requests."""
        info = inspect.type_info(union)
        self._kinds = [
            kind for kind in getattr(info, "types", [info]) if isinstance(kind, inspect.StructType)
        ]
        self._rng, self._names = rng, names

    def make_right_request(self) -> bytes:
        """Returns a request whose every field is within its bounds."""
        return msgspec.msgpack.encode(self._fill_struct(self._rng.choice(self._kinds)))

    def make_wrong_request(self) -> tuple[str, bytes]:
        """Returns a kind of fault, in words, and a request that has it."""
        kind = self._rng.choice(self._kinds)
        number = self._rng.randrange(max(1, len(kind.fields)))
        match self._rng.randrange(8):
            case 0 | 1 | 2 if kind.fields:
                return "a field out of bounds", self._encode_with_field(
                    kind, number, self._make_bad_value(kind.fields[number].type)
                )
            case 3 if kind.fields:
                value: Any = self._rng.choice([None, True, [], {}, b"x", "x", 1, 1.5, [[[]]], {"a": {}}])
                return "a field of another type", self._encode_with_field(kind, number, value)
            case 4:
                depth, opening = self._rng.choice(DEPTHS), self._rng.choice(OPENINGS)
                return "nesting", self._encode_with_raw_bytes(kind, opening * depth + b"\xc0")
            case 5:
                return "a claimed length", self._encode_with_raw_bytes(
                    kind, self._rng.choice(CLAIMS) + bytes(self._rng.randrange(20))
                )
            case 6:
                return "a text that is no UTF-8", self._encode_with_raw_bytes(kind, b"\xa4\xff\xfe\xed\xa0")
            case _:
                return "another tag", self._encode_with_tag(
                    kind, self._rng.choice(["Nope", "", 7, None, "x" * 10_000, self._choose_tag()])
                )

    # ---- structs

    def _choose_tag(self) -> Any:
        return self._rng.choice(self._kinds).tag

    def _fill_struct(self, kind: inspect.StructType) -> Any:
        values = [self._make_good_value(field.type) for field in kind.fields]
        return self._assemble_struct(kind, kind.tag, values)

    def _assemble_struct(self, kind: inspect.StructType, tag: Any, values: list[Any]) -> Any:
        if kind.array_like:
            return [*([] if kind.tag_field is None else [tag]), *values]
        named = {field.encode_name: value for field, value in zip(kind.fields, values, strict=True)}
        return named if kind.tag_field is None else {kind.tag_field: tag, **named}

    def _encode_with_field(self, kind: inspect.StructType, number: int, value: Any) -> bytes:
        values = [self._make_good_value(field.type) for field in kind.fields]
        values[number] = value
        return msgspec.msgpack.encode(self._assemble_struct(kind, kind.tag, values))

    def _encode_with_tag(self, kind: inspect.StructType, tag: Any) -> bytes:
        return msgspec.msgpack.encode(
            self._assemble_struct(kind, tag, [self._make_good_value(field.type) for field in kind.fields])
        )

    def _encode_with_raw_bytes(self, kind: inspect.StructType, raw: bytes) -> bytes:
        """Encodes a request with the bytes `raw` in the place of one field, or in an unknown field."""
        values = [self._make_good_value(field.type) for field in kind.fields]
        if values and self._rng.random() < 0.5:
            values[self._rng.randrange(len(values))] = msgspec.Raw(raw)
            return msgspec.msgpack.encode(self._assemble_struct(kind, kind.tag, values))
        whole = self._assemble_struct(kind, kind.tag, values)
        unknown = (
            [*whole, msgspec.Raw(raw)] if isinstance(whole, list) else {**whole, "unknown": msgspec.Raw(raw)}
        )
        return msgspec.msgpack.encode(unknown)

    # ---- fields

    def _make_good_value(self, kind: inspect.Type) -> Any:
        """Returns a value of the type within its bounds."""
        match kind:
            case inspect.Metadata(type=inner):
                return self._make_good_value(inner)
            case inspect.IntType():
                low, high = kind.ge or 0, kind.le if kind.le is not None else 100
                return self._rng.choice([low, min(high, low + self._rng.randrange(100)), min(high, low + 3)])
            case inspect.FloatType():
                return self._rng.choice([0.0, 0.01, 0.5])
            case inspect.StrType(pattern=pattern) if pattern is not None:
                return "tcp://10.0.0.7:5555"
            case inspect.StrType():
                return self._rng.choice(self._names)
            case inspect.ListType(item_type=item):
                return [self._make_good_value(item) for _ in range(self._rng.randrange(1, 4))]
            case inspect.TupleType(item_types=items):
                return [self._make_good_value(item) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                return {
                    self._make_good_value(key): self._make_good_value(value)
                    for _ in range(self._rng.randrange(3))
                }
            case inspect.StructType():
                return self._fill_struct(kind)
            case inspect.UnionType(types=types):
                return self._make_good_value(self._rng.choice(types))
            case inspect.BoolType():
                return self._rng.random() < 0.5
            case inspect.EnumType(cls=cls):
                return self._rng.choice([one.value for one in cls])
            case inspect.LiteralType(values=values):
                return self._rng.choice(values)
        return None

    def _make_bad_value(self, kind: inspect.Type) -> Any:
        """Returns a value of the type that may be out of its bounds."""
        rng = self._rng
        match kind:
            case inspect.Metadata(type=inner):
                return self._make_bad_value(inner)
            case inspect.IntType():
                return rng.choice(EXTREMES)
            case inspect.FloatType():
                return rng.choice([*FLOATS, *EXTREMES])
            case inspect.StrType():
                return rng.choice(
                    [
                        "",
                        "\0",
                        "../../etc/passwd",
                        "x" * 201,
                        "y" * 4001,
                        "\u202e\n",
                        "z" * rng.choice([70_000, 1 << 20]),
                    ]
                )
            case inspect.ListType(item_type=item):
                many = rng.choice([0, 0, 20_000, 100_000])
                return [self._make_good_value(item)] * many if many else [self._make_bad_value(item)]
            case inspect.TupleType(item_types=items):
                return [self._make_bad_value(item) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                if rng.random() < 0.1:
                    return dict.fromkeys(range(20_000), 1)
                return {
                    self._make_good_value(key): self._make_bad_value(value),
                    self._make_bad_value(key): self._make_good_value(value),
                }
            case inspect.StructType(fields=fields):
                chosen = rng.randrange(len(fields))
                values = [
                    self._make_bad_value(f.type) if n == chosen else self._make_good_value(f.type)
                    for n, f in enumerate(fields)
                ]
                return self._assemble_struct(kind, kind.tag, values)
            case inspect.UnionType(types=types):
                return self._make_bad_value(rng.choice(types))
            case inspect.EnumType() | inspect.LiteralType():
                return rng.choice(["nope", 0, -1, "x" * 1000])
        return rng.choice([None, 2, "yes"])


def damage_bytes(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Returns `data` with bytes changed, cut out or doubled, or with a part of one of the `others` in it."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(1, len(changed)))
        match rng.randrange(6):
            case 0 if changed:
                changed[place] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[place] = rng.choice([0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.getrandbits(8)])
            case 2:
                del changed[place : place + rng.choice([1, 4, 8, len(changed)])]
            case 3:
                changed[place:place] = changed[place : place + rng.randrange(64)]
            case 4:
                other = rng.choice(others)
                start = rng.randrange(max(1, len(other)))
                changed[place : place + rng.randrange(32)] = other[start : start + rng.randrange(64)]
            case _ if len(changed) >= 8:
                form = rng.choice(["<i", "<q"])
                place = place // 8 * 8 if place // 8 * 8 + 8 <= len(changed) else 0
                bits = 31 if form == "<i" else 63
                value = rng.choice([one for one in EXTREMES if -(2**bits) <= one < 2**bits])
                struct.pack_into(form, changed, place, value)
    return bytes(changed)


def make_wrong_frames(rng: random.Random) -> Iterator[list[bytes]]:
    """Yields messages with wrong frames, without end."""
    for number in itertools.count():
        few = rng.randrange(3)
        yield rng.choice(
            [
                [b""],
                [b"", b""],
                [number.to_bytes(8, "little")],
                [rng.randbytes(8)] * few or [b"x"],
                [rng.randbytes(8), b"", *[b"x"] * rng.randrange(2, 200)],
                [rng.randbytes(rng.choice([65, 300, 70_000])), b"\x80"],
                [rng.randbytes(8), rng.randbytes(rng.randrange(300))],
                [rng.randbytes(8), bytes(rng.choice([1, 5_000, 2_000_000]))],
            ]
        )
