"""Text to tokens: the special tokens of a template are special, the same words in a message are text."""

import copy
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

log = logging.getLogger("slipstream.generator")

PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]
"""Characters that no text has a meaning for; one of them breaks up the special tokens in messages."""
NAME_BEGIN, NAME_END = "\U000f0000", "\U000f0001"
"""Around the other names of special tokens."""


class TextEncoder:
    """Encodes templates' text with a model's tokenizer, and keeps messages from forging special tokens.

    A message that says "<|im_end|>" would end its own turn, because a tokenizer reads these characters as the
    special token. `guard_text` breaks them up before a template sees them; `encode_guarded` gives those of
    the template other names, mends the others, and reads the names only as special tokens. Markers such as
    "<think>" that the tokenizer itself does not call special stay what they are.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                "model.path must hold a fast tokenizer (tokenizer.json) for episodes of several turns, got "
                f"{type(tokenizer).__name__}"
            )
        specials = {
            number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        longest_first = sorted(
            (token.content for token in specials.values()), key=lambda text: (-len(text), text)
        )
        self._special = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
        # Copies, because a tokenizer's padding and truncation are settings that others may change.
        self._structured, self._literal = copy.deepcopy(backend), copy.deepcopy(backend)
        for own in (self._structured, self._literal):
            own.no_padding()
            own.no_truncation()
        self._literal.encode_special_tokens = True
        # Nobody who writes messages can know these names.
        secret = secrets.token_hex(8)
        self._names = {
            token.content: f"{NAME_BEGIN}{secret}:{number}{NAME_END}" for number, token in specials.items()
        }
        self._literal.add_tokens(
            [
                AddedToken(
                    self._names[token.content],
                    special=False,
                    normalized=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                )
                for token in specials.values()
            ]
        )
        self._numbers: dict[int, int] = {
            self._literal.token_to_id(self._names[token.content]): number
            for number, token in specials.items()
        }
        """The special token's id by that of its other name."""
        self._has_bound, self._normalizes = has_byte_bound(backend)
        self._num_put_around = int(backend.num_special_tokens_to_add(False))
        self.guards = self._check_guard()
        """False where the tokenizer reads the other names otherwise; then nothing is broken up."""
        if not self.guards:
            log.warning(
                "this tokenizer reads special tokens in messages: an environment's text could forge a turn"
            )

    def list_specials(self, text: str) -> list[str]:
        """Returns the special tokens of a text, in their order."""
        return self._special.findall(text)

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes text whose special tokens are meant."""
        return _encode(self._structured, text, add_special_tokens)

    def encode_literal(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes text in which special tokens are ordinary characters. `add_special_tokens` puts in what the
        tokenizer begins or ends a text with."""
        return _encode(self._literal, text, add_special_tokens)

    def bound_tokens(self, text: str) -> int | None:
        """Returns a number of tokens that the text cannot exceed, special tokens put around it included; None
        where none is known. Far cheaper than encoding.

        BPE begins with the bytes or characters of the normalized text and only merges them, and an added
        token stands for its own characters. So no token stands for less than a byte, unless a normalizer or a
        pre-tokenizer puts something in.
        """
        if not self._has_bound or (self._normalizes and not text.isascii()):
            return None
        return len(text.encode()) + self._num_put_around

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts whose special tokens are meant, on all processors."""
        return [encoding.ids for encoding in self._structured.encode_batch_fast(list(texts), False)]

    def guard_text(self, value: Any) -> tuple[Any, str]:
        """Breaks up special tokens in all strings of messages or tools. Returns the same structure, and the
        character that was put in, which is "" where there was nothing to break."""
        strings = list(_list_strings(value))
        if not self.guards or not any(self._special.search(text) for text in strings):
            return value, ""
        used = set().union(*strings)
        mark = next(character for character in PRIVATE if character not in used)
        return self._break_up(value, mark), mark

    def encode_guarded(self, text: str, mark: str) -> list[int]:
        """Encodes a template's text; where `mark` broke up a special token in a message, its characters
        become ordinary tokens."""
        if not mark or mark not in text:
            return self.encode_text(text)
        return self._encode_named(text, mark)

    def _encode_named(self, text: str, mark: str) -> list[int]:
        named = self._special.sub(lambda found: self._names[found[0]], text).replace(mark, "")
        return [self._numbers.get(number, number) for number in self.encode_literal(named)]

    def _break_up(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._break_up(key, mark): self._break_up(part, mark) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self._break_up(part, mark) for part in value]
        return value

    def _check_guard(self) -> bool:
        """True where a text with the other names encodes to what it does with the special tokens."""
        texts = ["a\n", "\n\n b ", "", "user\nwhat is 7?", " ", "x"]
        for special in self._names:
            whole = special + special.join(texts)
            if len(special) > 1 and self._encode_named(whole, PRIVATE[0]) != self.encode_text(whole):
                return False
        return True


def has_byte_bound(backend: Any) -> tuple[bool, bool]:
    """Returns whether a tokenizer makes no more tokens than the text has bytes, and whether that holds of
    ASCII alone: a composing normalizer leaves that as it is, and may lengthen other text."""
    rules = json.loads(backend.to_str())
    normalizer = (rules.get("normalizer") or {}).get("type")
    steps = rules.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    puts_in_nothing = all(
        step.get("type") in (None, "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit")
        or (step.get("type") == "ByteLevel" and not step.get("add_prefix_space"))
        for step in steps
    )
    is_known = rules["model"].get("type") == "BPE" and normalizer in (None, "NFC", "NFKC")
    return is_known and puts_in_nothing, normalizer is not None


def _encode(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Encodes a text as a batch of one: so the interpreter's lock is free meanwhile, and the engine's loop
    goes on. The tokenizer's `encode` holds it, for seconds where a tool answers with megabytes."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _list_strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _list_strings(part)]
    if isinstance(value, Sequence):
        return [text for part in value for text in _list_strings(part)]
    return []
