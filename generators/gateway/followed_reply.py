"""Follows a reply while it is sampled: its text is shown as it comes, and its stop ends it early."""

from collections.abc import Callable, Sequence
from typing import Any

from generators.engine import Completion
from generators.gateway.stops import cut_at_stop, find_stop_string
from generators.policy import Watch

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Stands at the end of a text whose last character lacks tokens."""
LONGEST_WINDOW = 256
"""Tokens that are held for a character that is never complete."""


class TextDecoder:
    """Decodes tokens as they come, and holds back a character that is not complete."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._num_before = 0
        """Tokens of the window whose text has been returned: what stands before a token decides on spaces."""

    def decode_more(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens add."""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE) and len(self._window) < LONGEST_WINDOW:
            return ""
        before = self._decode(self._window[: self._num_before])
        del self._window[: self._num_before]
        self._num_before = len(self._window)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens))


class FollowedReply:
    """One reply of a request, `generators.group.ReplyFollower`."""

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
        show_text: Callable[[str], None] | None = None,
    ) -> None:
        """`show_text` gets the reply's text piece by piece, without special tokens, up to the stop."""
        self._tokenizer, self._stop, self._stop_tokens = tokenizer, stop, stop_tokens
        self._show_text = show_text
        self._tokens: list[int] = []
        self._searched, self._spoken = (
            TextDecoder(tokenizer, skip_special_tokens=skips) for skips in (False, True)
        )
        self._longest_part = max(map(len, stop), default=1) - 1
        """Characters at the end of a text that may be the beginning of a stop string."""
        self._tail = ""
        self._held_back = ""
        self.shown = ""
        """The text that `show_text` got."""

    @property
    def watch(self) -> Watch | None:
        """None where nothing is to be seen: the engine itself ends replies at stop tokens."""
        return self._take_tokens if self._stop or self._show_text is not None else None

    def _take_tokens(self, tokens: list[int]) -> bool:
        self._tokens += tokens
        if self._has_stopped(tokens):
            return True
        if self._show_text is not None:
            self._show_more(self._spoken.decode_more(tokens))
        return False

    def cut_reply(self, completion: Completion) -> Completion:
        return cut_at_stop(completion, self._tokenizer, self._stop, self._stop_tokens)

    def _has_stopped(self, tokens: list[int]) -> bool:
        if not self._stop:
            return False
        text = self._tail + self._searched.decode_more(tokens)
        self._tail = text[max(0, len(text) - self._longest_part) :]
        # The whole text decides, here and where the reply is cut.
        return (
            any(one in text for one in self._stop)
            and find_stop_string(self._tokens, self._tokenizer, self._stop) is not None
        )

    def _show_more(self, text: str) -> None:
        assert self._show_text is not None
        held = self._held_back + text
        count = len(held) - self._longest_part
        if count > 0:
            self.shown += held[:count]
            self._show_text(held[:count])
        self._held_back = held[max(0, count) :]
