"""Stop strings and stop tokens of a request: a reply is recorded up to where it stopped, and no further.

The engine knows no text, so it is told to end a reply when its stop has been seen here. What it has sampled
behind the stop by then is thrown away: tokens follow from those before them only, so the record is that of an
engine that stops there.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from generators.engine import Completion


def cut_at_stop(
    completion: Completion, tokenizer: Any, stop: Sequence[str], stop_tokens: Collection[int]
) -> Completion:
    """Returns the reply up to the first stop token, or the token that completes the first stop string; itself
    where it has neither."""
    tokens = completion.tokens
    ends = [place for place, token in enumerate(tokens, 1) if token in stop_tokens]
    count = ends[0] if ends else len(tokens)
    place = find_stop_string(tokens[:count], tokenizer, stop) if stop else None
    if place is None and not ends:
        return completion
    return cut_completion(completion, count if place is None else place)


def cut_completion(completion: Completion, count: int) -> Completion:
    """Returns the first `count` tokens of a completion, as one that has stopped."""
    experts = completion.experts
    if experts is not None:
        experts = experts[: len(experts) - len(completion.tokens) + count]
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        versions=completion.versions[:count],
        experts=experts,
        finish_reason="stop",
    )


def cut_text(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text


def find_stop_string(tokens: list[int], tokenizer: Any, stop: Sequence[str]) -> int | None:
    """Returns the least number of tokens that hold a stop string; None where there is none."""

    def holds_stop(count: int) -> bool:
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        return any(one in text for one in stop)

    low, high = 0, len(tokens)
    if not holds_stop(high):
        return None
    # A text that holds a stop string holds it with more tokens too.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_stop(middle) else (middle, high)
    return high
