"""The prompt of one turn as tokens: one function for the engine, the filter by length and the preview."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from generators.rendering.encoder import TextEncoder
from generators.rendering.messages import TEMPLATE_ERRORS, adapt_message, read_content


class PromptEncoder:
    """Encodes messages with a model's chat template, up to where the policy begins its reply.

    A special token's characters in a message are ordinary text. A tokenizer without a chat template gets the
    contents, with an empty line between two.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        has_backend = getattr(tokenizer, "backend_tokenizer", None) is not None
        self._encoder = TextEncoder(tokenizer) if has_backend else None
        self._frames: dict[Any, int | None] = {}
        """The bytes around the contents, by the roles of messages."""

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Raises ValueError for messages that the chat template refuses."""
        text, mark = self.render_prompt(messages, template_args)
        return self.encode_rendered(text, mark)

    def render_prompt(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> tuple[str, str]:
        """Returns the text that is encoded, and the character that breaks up special tokens in messages (""
        where there are none)."""
        if not self._tokenizer.chat_template:
            return "\n\n".join(read_content(dict(message)) for message in messages), ""
        guarded = [adapt_message(dict(message), arguments_as_objects=True) for message in messages]
        mark = ""
        if self._encoder is not None:
            guarded, mark = self._encoder.guard_text(guarded)
        try:
            text = self._tokenizer.apply_chat_template(
                guarded, tokenize=False, add_generation_prompt=True, **(template_args or {})
            )
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"messages must be ones that the model's chat template accepts, got {roles}: {error}"
            ) from error
        return str(text), mark

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Encodes what `render_prompt` has returned."""
        is_template = bool(self._tokenizer.chat_template)
        if self._encoder is None:
            return list(self._tokenizer.encode(text, add_special_tokens=not is_template))
        if is_template:
            return self._encoder.encode_guarded(text, mark)
        return self._encoder.encode_literal(text, add_special_tokens=True)

    def bound_tokens(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None
    ) -> int | None:
        """Returns a number of tokens that the prompt does not exceed; None where none is known. Far cheaper
        than rendering and encoding.

        It counts the bytes of what the template puts around the contents, and those of the contents twice: a
        template that shows each content once may still say a word about it. Other fields of messages, such as
        calls of tools, may be of any length, so none is known with them.
        """
        if self._encoder is None or any(message.keys() != {"role", "content"} for message in messages):
            return None
        texts = [read_content(dict(message)) for message in messages]
        frame = self._find_frame(messages, template_args or {})
        bounds = [self._encoder.bound_tokens(text) for text in texts]
        if frame is None or None in bounds:
            return None
        return frame + 2 * sum(bound for bound in bounds if bound is not None)

    def _find_frame(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
    ) -> int | None:
        """Returns the bytes that the template puts around messages of these roles; None where it shows a
        content twice, or not at all."""
        key = tuple(message["role"] for message in messages), json.dumps(template_args)
        if key not in self._frames:
            marked = [
                {**message, "content": f"MARKED{place}CONTENT"} for place, message in enumerate(messages)
            ]
            text, _ = self.render_prompt(marked, template_args)
            is_once = all(text.count(message["content"]) == 1 for message in marked)
            self._frames[key] = len(text.encode()) if is_once else None
        return self._frames[key]

    def count_tokens(self, rendered: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the numbers of tokens of what `render_prompt` has returned."""
        if self._encoder is None or not self._tokenizer.chat_template or any(mark for _, mark in rendered):
            return [len(self.encode_rendered(text, mark)) for text, mark in rendered]
        return list(map(len, self._encoder.encode_many([text for text, _ in rendered])))

    def digest_rules(self) -> str:
        """Returns a digest of all that decides how a prompt is encoded."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = type(tokenizer).__name__ if backend is None else backend.to_str()
        return xxhash.xxh3_128_hexdigest(f"{rules}{json.dumps(tokenizer.chat_template)}".encode())
