"""`episodes`: how long an episode may be, how long its code may take, and how its messages become tokens."""

from dataclasses import dataclass
from enum import StrEnum

from configs.gateway import GatewayConfig
from configs.rules import POSITIVE, above_up_to
from configs.setting import Condition, Section, section, setting


class RendererKind(StrEnum):
    """How messages become tokens (`generators/rendering/`)."""

    auto = "auto"
    """The model's own renderer where the package `renderers` names it, else the template's difference."""
    difference = "difference"
    """The chat template's text behind a marked reply; works with every append-only template."""
    plain = "plain"
    """The messages' text as it is, for models without a chat template."""


@dataclass(kw_only=True, slots=True)
class EpisodesConfig(Section):
    """Episodes: their length, the deadlines of the code that they run, and how messages become tokens."""

    max_turns: int = setting(16, above_up_to(0, 32767, "the record counts turns in 16 bits"))
    """Replies of the policy in one episode. Then it ends with `max_turns`."""
    max_concurrent: int | None = setting(None, POSITIVE)
    """Episodes under way in one generator, those that wait for a tool included. Null:
    `generators.max_sequences`, and of agents at most 16 for each processor of the host."""
    start_timeout_s: float = setting(300.0, POSITIVE)
    """Seconds that importing the task's module and making its object may take."""
    reset_timeout_s: float = setting(30.0, POSITIVE)
    """Seconds that `make_prompt`, or an environment's `reset`, may take."""
    turn_timeout_s: float = setting(60.0, POSITIVE)
    """Seconds that an environment's `step` may take."""
    score_timeout_s: float = setting(30.0, POSITIVE)
    """Seconds that `score_response` or `score_group` may take. Then its group fails, and its worker
    process is killed with all its children."""
    timeout_s: float = setting(1800.0, POSITIVE)
    """Seconds that a whole episode may take, the policy's replies included, once it has a worker."""
    max_workers: int | None = setting(None, POSITIVE)
    """Worker processes of one generator that run a task's code. An environment keeps one for its episode;
    a task of one turn shares a few. Null: as many as there may be episodes."""
    worker_memory_mb: int = setting(4096, POSITIVE)
    """Memory that one worker process may allocate, in MB: its private memory, libraries' code not counted.

    An allocation beyond it raises MemoryError in the task's code, and the worker is killed.
    """
    worker_output_mb: int = setting(16, POSITIVE)
    """Largest output of one call, in MB. A worker that prints more is killed."""
    renderer: RendererKind = setting(RendererKind.auto)
    """How messages become tokens."""
    exact: bool = setting(True)
    """Refuse, at start-up, a chat template under which a conversation cannot go on with exactly the tokens
    that were sampled. False: such a turn begins a new branch."""
    tool_parser: str | None = setting(None)
    """vLLM's parser of tool calls: `hermes`, `llama3_json`, `qwen3_coder` … Null: replies are text."""
    reasoning_parser: str | None = setting(None)
    """vLLM's parser of reasoning: `qwen3`, `deepseek_r1` … Null: replies are not divided."""
    gateway: GatewayConfig = section(GatewayConfig)

    def conditions(self) -> list[Condition]:
        parts = {
            "reset_timeout_s": self.reset_timeout_s,
            "turn_timeout_s": self.turn_timeout_s,
            "score_timeout_s": self.score_timeout_s,
        }
        longest = max(parts, key=lambda name: parts[name])
        return [
            Condition(
                parts[longest] <= self.timeout_s,
                f"episodes.{longest}",
                "be at most episodes.timeout_s (a part of an episode cannot take longer than the whole)",
                f"{parts[longest]:g} and {self.timeout_s:g}",
            )
        ]
