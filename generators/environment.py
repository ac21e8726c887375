"""The protocol of an environment, which speaks with the policy in messages, turn by turn.

    reset(row, seed) ─▶ Turn ─▶ the policy replies ─▶ step(reply) ─▶ Turn ─▶ … ─▶ Turn(done) ─▶ close()

An environment writes messages; tokens are the generator's business. It runs in a worker process of its own,
so it may block, hang or crash: that costs its own group an attempt. Environments that come with Slipstream
are in `generators/environments/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from generators.task import Score

Message = dict[str, Any]
"""A message in OpenAI's form: `role`, `content`, and for a reply perhaps `tool_calls` and
`reasoning_content`."""
ToolSpec = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Row = dict[str, Any]
"""The facts that an episode is made from, in JSON's types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An environment's answer to a reply, and at the beginning its first words."""

    messages: Sequence[Message] = ()
    """The messages that follow the last reply. None of them is an assistant's. Needed unless `done`."""
    tools: Sequence[ToolSpec] = ()
    """The tools that the policy may call, in the first turn only."""
    reward: float = 0.0
    """Paid for the reply just taken; 0 in the first turn. An episode's reward is the sum over its turns."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for the record. Over turns they are added up."""
    done: bool = False
    """True when the episode has ended: the policy is not asked again."""


class Environment(Protocol):
    """One instance plays one episode. Each method may be `async`."""

    def reset(self, row: Row, seed: int) -> Turn:
        """Begins the episode. The same row and seed give the same episode for the same replies."""
        ...

    def step(self, reply: Message) -> Turn:
        """Takes the policy's reply: `content`, and where there are any `reasoning_content` and
        `tool_calls`."""
        ...

    def close(self) -> None:
        """Lets go of what the episode holds. It is called once, also for an episode that was cut short."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """A finished episode as `EnvironmentTask.score_group` sees it."""

    row: Row
    messages: Sequence[Message]
    """The whole conversation, replies included."""
    reward: float
    """Sum of the rewards of its turns."""
    components: Mapping[str, float]
    stop: str
    """Why it ended: `completed`, `max_turns`, `max_tokens`, `context_overflow` or `parse_error`."""
    num_tokens: int = 0
    """Tokens of its last reply."""
    tokens: Sequence[int] = ()
    """Those tokens, for a task with an attribute `needs_tokens` that is true."""


class EnvironmentTask(Protocol):
    """Makes the rows and the environments of a run. Rows are named by (split, index, seed), as prompts are.

    `num_prompts` means what it means for `generators.task.Task`. A task with a method
    `example_conversations(split, seed)` yields whole episodes of a weak player without end, as lists of
    messages. The tiny model is warm-started on them until it reaches a reward of 0.2; without the method a
    run needs a model folder.
    """

    name: str

    def make_row(self, split: str, index: int, seed: int) -> Row: ...

    def make_environment(self, row: Row) -> Environment: ...

    def score_group(self, episodes: Sequence[EpisodeRecord]) -> Sequence[Score] | None:
        """Scores the episodes of a group beside one another (pairwise, best of n). None keeps the rewards of
        their turns. The method may be missing."""
        ...


class AgentTask(Protocol):
    """Runs an agent, which asks the policy over HTTP in OpenAI's form (`generators/gateway/`).

    In place of `run_agent` it may have `agent_command`, the words of a command. `num_prompts` and
    `solved_examples` mean what they mean for `generators.task.Task`.
    """

    name: str

    def make_row(self, split: str, index: int, seed: int) -> Row: ...

    def run_agent(self, row: Row, base_url: str, api_key: str) -> Any:
        """Plays one episode; returns its outcome: a reward, or an object of `reward` and components. It may
        be `async`. Whatever it raises costs its group an attempt."""
        ...

    def score_agent(self, row: Row, outcome: Any) -> Score:
        """Scores an outcome. The method may be missing."""
        ...
