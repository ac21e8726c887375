"""The body of `POST /v1/chat/completions`.

Behavior log-probabilities must be those of the run's sampling, so what would change the distribution of
tokens is refused unless it says what the run does, or what OpenAI's protocol does by default. Other unknown
fields are passed over, as clients send many (`user`, `store`, `metadata`, `seed`).
"""

from dataclasses import dataclass
from typing import Any

from configs.sampling import SamplingConfig
from generators.environment import Message, ToolSpec
from generators.gateway.fields import BodyFields
from generators.gateway.messages import read_messages, read_tools
from generators.gateway.refusals import refuse_field

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP = 1000
"""Characters of a stop string."""
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    model: str
    """Any name: there is one policy. The answer repeats it."""
    messages: list[Message]
    tools: list[ToolSpec]
    reads_calls: bool
    """False without tools, and with `tool_choice=none`, where the policy sees them: what looks like a call
    stays text."""
    num_choices: int
    max_tokens: int | None
    stop: list[str]
    has_logprobs: bool
    is_streamed: bool
    streams_usage: bool


def read_chat_request(body: BodyFields, sampling: SamplingConfig) -> ChatRequest:
    """Raises RequestRefused that names the field, the rule and the value."""
    _refuse_constraints(body)
    _refuse_other_forms(body)
    refuse_other_sampling(body, sampling)
    tools = read_tools(body)
    options = BodyFields(body.read_any("stream_options") or {}, "stream_options.")
    body.read_count("top_logprobs", 0, 20)
    limits = [body.read_count(name, 1, MAX_COUNT) for name in ("max_completion_tokens", "max_tokens")]
    return ChatRequest(
        model=body.read_text("model", ""),
        messages=read_messages(body),
        tools=tools,
        reads_calls=bool(tools) and body.read_any("tool_choice") != "none",
        num_choices=body.read_count("n", 1, MAX_CHOICES) or 1,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=_read_stop(body),
        has_logprobs=body.read_flag("logprobs"),
        is_streamed=body.read_flag("stream"),
        streams_usage=options.read_flag("include_usage"),
    )


def refuse_other_sampling(fields: BodyFields, sampling: SamplingConfig) -> None:
    """Refuses parameters with which tokens would have other probabilities than those that are trained on."""
    why = "the run's, because log-probabilities are trained on that are its own"
    runs: dict[str, tuple[Any, ...]] = {
        "temperature": (sampling.temperature, 1.0),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1, 0),
        "min_p": (sampling.min_p, 0),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "bad_words": ([],),
        "allowed_token_ids": ([],),
    }
    for name, allowed in runs.items():
        fields.require_value(name, allowed, why)


def _refuse_other_forms(body: BodyFields) -> None:
    """Refuses what servers like vLLM take beside OpenAI's protocol and what would make another prompt or
    another reply: to pass over it would be an answer to another question."""
    why = "prompts and replies have the form that the run's renderer gives them"
    forms: dict[str, tuple[Any, ...]] = {
        "add_generation_prompt": (True,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "stop_token_ids": ([],),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }
    for name, allowed in forms.items():
        body.require_value(name, allowed, why)


def _refuse_constraints(body: BodyFields) -> None:
    """Refuses what would force the form of a reply, and fields of OpenAI's older protocol."""
    why = "replies are sampled without constraints"
    body.require_value("tool_choice", ("auto", "none"), why)
    body.require_value("response_format", ({"type": "text"},), why)
    for name in ("functions", "function_call", "guided_json", "guided_regex", "structured_outputs"):
        if body.read_any(name) is not None:
            raise body.refuse(name, f"left out ({why}; tools go into the field tools)")


def _read_stop(body: BodyFields) -> list[str]:
    value = body.read_any("stop")
    stops = [value] if isinstance(value, str) else body.read_list("stop")
    if len(stops) > MAX_STOPS:
        raise refuse_field("stop", f"at most {MAX_STOPS} strings", len(stops))
    for one in stops:
        if not isinstance(one, str) or not 1 <= len(one) <= MAX_STOP:
            raise refuse_field("stop", f"strings of 1 to {MAX_STOP} characters", one)
    return stops
