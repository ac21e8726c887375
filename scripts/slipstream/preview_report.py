"""The conclusions of a preview: what the first steps train, and what the run would reject."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffers.terms import make_terms
from configs.checks import find_warnings
from configs.schema import Config
from slipstream.preview_play import PreviewGroup, PreviewSample, count_first_groups

LISTED = 5
"""Groups that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewSource:
    """A source of prompts in the first steps."""

    name: str
    size: int | None
    """Number of its training prompts; None: no end."""
    share: float
    """Its weight over the sum of all."""
    first_step: int
    """Groups of the first step that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewReport:
    """All that a preview says beside the prompts."""

    sources: Sequence[PreviewSource]
    groups_per_step: int
    tokens_per_step: int | None
    """Sampled tokens of a step, from the replies that were shown; None: there were none."""
    lines: Mapping[str, str]
    """Facts by name, in words."""
    rejected: Sequence[str]
    notes: Sequence[str]


def make_report(
    config: Config, groups: Sequence[PreviewGroup], num_too_long: Mapping[str, int], *, has_engine: bool
) -> PreviewReport:
    """`num_too_long`: prompts that are left out for their length, by split and source."""
    learner, sources = config.learner, make_terms(config).list_sources()
    first, weights = count_first_groups(config, learner.groups_per_step), [one.weight for one in sources]
    samples = [sample for group in groups for sample in group.samples]
    tokens = None
    if has_engine and samples:
        mean = sum(sample.num_sampled for sample in samples) / len(samples)
        tokens = round(mean * learner.groups_per_step * learner.samples_per_prompt)
    return PreviewReport(
        sources=[
            PreviewSource(name=one.name, size=one.size, share=one.weight / sum(weights), first_step=count)
            for one, count in zip(sources, first, strict=True)
        ],
        groups_per_step=learner.groups_per_step,
        tokens_per_step=tokens,
        lines=describe_steps(config, groups, tokens),
        rejected=list_rejected(config, groups, num_too_long),
        notes=[*list_notes(config, groups, has_engine), *find_warnings(config)],
    )


def describe_steps(config: Config, groups: Sequence[PreviewGroup], tokens: int | None) -> dict[str, str]:
    learner, sources = config.learner, make_terms(config).list_sources()
    lines = {
        "a step": f"{learner.groups_per_step:,} prompts × {learner.samples_per_prompt} replies = "
        f"{learner.groups_per_step * learner.samples_per_prompt:,} sequences"
        + ("" if tokens is None else f", about {tokens:,} sampled tokens")
    }
    num_prompts = config.run.steps * learner.groups_per_step
    sizes = [one.size for one in sources]
    epochs = ""
    if None not in sizes:
        epochs = f", {num_prompts / sum(size for size in sizes if size is not None):,.1f} epochs"
    lines["the run"] = f"{config.run.steps:,} steps, {num_prompts:,} prompts{epochs}"
    if lengths := [len(group.prompt) for group in groups if group.prompt]:
        shortest = "" if min(lengths) == max(lengths) else f"{min(lengths):,} to "
        lines["prompts"] = (
            f"{shortest}{max(lengths):,} tokens, and replies of up to {config.sampling.max_tokens:,}, in a "
            f"context of {config.generators.max_model_len:,}"
        )
    return lines


def list_rejected(
    config: Config, groups: Sequence[PreviewGroup], num_too_long: Mapping[str, int]
) -> list[str]:
    """Returns a line for each way in which something would be left out, fail or be rejected."""
    lines = [
        f"{count:,} prompts of {name} are longer than data.max_prompt_tokens and are left out"
        for name, count in num_too_long.items()
        if count
    ]
    failed = [group for group in groups if group.error]
    if failed:
        lines.append(f"{_count(failed, groups)} would fail: {failed[0].error}")
    samples = [sample for group in groups for sample in group.samples]
    if cut := [sample for sample in samples if sample.stop in ("max_tokens", "context_overflow")]:
        key = (
            "algo.reward.overlong_filter leaves them out"
            if config.algo.reward.overlong_filter
            else ("they are trained as they are")
        )
        lines.append(f"{len(cut)} of {len(samples)} replies are cut off (sampling.max_tokens); {key}")
    for rule in ("algo.dynamic_sampling", "curriculum.keep"):
        if found := [group for group in groups if group.rejection == rule]:
            lines.append(f"{_count(found, groups)} would be rejected by {rule}")
    return lines


def list_notes(config: Config, groups: Sequence[PreviewGroup], has_engine: bool) -> list[str]:
    samples = [sample for group in groups for sample in group.samples]
    notes = []
    answered = [sample for group in groups if group.answer for sample in group.samples]
    if not has_engine and answered and all(sample.reward <= 0 for sample in answered):
        notes.append(
            "no right answer gets a reward above 0 as a reply by itself: does the reward want a form "
            "(\\boxed{…}, <answer>, ####) that the prompt asks for?"
        )
    several = [group for group in groups if len(group.samples) > 1]
    equal = [group for group in several if _are_equal(group.samples)]
    if equal and not any(group.rejection for group in equal):
        notes.append(f"the rewards are equal in {_count(equal, several)}, which so teach nothing")
    if has_engine and len(samples) > 1 and all(sample.reward == samples[0].reward for sample in samples):
        notes.append(f"every reply has the reward {samples[0].reward:g}")
    return notes


def _are_equal(samples: Sequence[PreviewSample]) -> bool:
    return len({sample.reward for sample in samples}) == 1


def _count(found: Sequence[PreviewGroup], groups: Sequence[PreviewGroup]) -> str:
    named = ", ".join(str(group.group + 1) for group in found[:LISTED])
    more = ", …" if len(found) > LISTED else ""
    return f"{len(found)} of {len(groups)} groups ({named}{more})"
