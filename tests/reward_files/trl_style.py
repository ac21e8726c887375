"""Rewards as users of TRL write them for `GRPOTrainer(reward_funcs=...)`."""

import asyncio
import re


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    extracted = [re.sub(r"</answer>.*", "", one.split("<answer>")[-1]).strip() for one in responses]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [2.0 if found == right else 0.0 for found, right in zip(extracted, answer, strict=True)]


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think>\s*<answer>.*?</answer>$"
    return [1.0 if re.match(pattern, one[0]["content"], re.DOTALL) else 0.0 for one in completions]


def length_reward_func(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def text_reward_func(prompts, completions, ground_truth, **kwargs):
    return [
        float(completion.startswith(prompt[:1] + right))
        for prompt, completion, right in zip(prompts, completions, ground_truth, strict=True)
    ]


def math_only_reward_func(completions, kind, log_metric=None, log_extra=None, **kwargs):
    """Says nothing about other kinds of prompts, and logs."""
    log_metric("share_of_math", sum(one == "math" for one in kind) / len(kind))
    log_extra("characters", [len(one[0]["content"]) for one in completions])
    log_extra("texts", [one[0]["content"] for one in completions])
    return [
        1.0 if one == "math" and "4" in completion[0]["content"] else 0.0 if one == "math" else None
        for one, completion in zip(kind, completions, strict=True)
    ]


async def best_of_group_reward_func(completions, **kwargs):
    """Compares the replies of a group: the shortest wins."""
    await asyncio.sleep(0)
    lengths = [len(one[0]["content"]) for one in completions]
    return [float(length == min(lengths)) for length in lengths]


def schedule_reward_func(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step) for _ in completions]
