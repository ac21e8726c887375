"""The body of `POST /inference/v1/generate`, and its answer: vLLM's endpoint of tokens in, tokens out, as the
training client of verifiers calls it."""

from dataclasses import dataclass
from typing import Any

from configs.sampling import SamplingConfig
from generators.engine import Completion
from generators.gateway.chat_request import MAX_CHOICES, MAX_COUNT, refuse_other_sampling
from generators.gateway.fields import BodyFields

MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    prompt: list[int]
    num_choices: int
    max_tokens: int | None
    stop_tokens: frozenset[int]


def read_token_request(body: BodyFields, sampling: SamplingConfig, vocabulary: int) -> TokenRequest:
    """`vocabulary` is the number of token ids. Raises RequestRefused that names field, rule and value."""
    params = BodyFields(body.read_any("sampling_params") or {}, "sampling_params.")
    refuse_other_sampling(params, sampling)
    for name in ("stop", "structured_outputs"):
        if params.read_any(name):
            raise params.refuse(name, "left out (this endpoint gives tokens; stop_token_ids end a reply)")
    params.require_value("prompt_logprobs", (False,), "prompts are not scored")
    body.require_value("stream", (False,), "the reply comes in one piece")
    stop_tokens = _read_tokens(params, "stop_token_ids", vocabulary, MAX_STOP_TOKENS)
    return TokenRequest(
        prompt=_read_tokens(body, "token_ids", vocabulary, None),
        num_choices=params.read_count("n", 1, MAX_CHOICES) or 1,
        max_tokens=params.read_count("max_tokens", 1, MAX_COUNT),
        stop_tokens=frozenset(stop_tokens),
    )


def make_token_answer(request_id: str, completions: list[Completion]) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": number,
                "token_ids": completion.tokens,
                "finish_reason": completion.finish_reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
                    ]
                },
            }
            for number, completion in enumerate(completions)
        ],
    }


def _read_tokens(fields: BodyFields, name: str, vocabulary: int, most: int | None) -> list[int]:
    tokens = fields.read_list(name)
    if most is not None and len(tokens) > most:
        raise fields.refuse(name, f"at most {most} token ids")
    if most is None and not tokens:
        raise fields.refuse(name, "a list of token ids")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise fields.refuse(name, f"token ids from 0 to {vocabulary - 1}")
    return tokens
