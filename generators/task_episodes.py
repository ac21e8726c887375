"""The episodes of a task: its code runs in worker processes, and its messages become tokens here.

    one turn      make_prompt ─▶ tokens ─▶ the policy ─▶ score_response
    several       reset ─▶ tokens ─▶ the policy ─▶ step ─▶ tokens ─▶ the policy ─▶ … ─▶ close

A turn's prompt begins with the exact tokens of the last prompt and reply. Where the renderer cannot do that,
the conversation is rendered anew and a new branch begins.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffers.messages import Lease
from buffers.trajectory import infer_stop
from configs.schema import Config
from generators.agent_episodes import AgentEpisodes, limit_agents
from generators.engine import Completion
from generators.environment import Message, ToolSpec
from generators.group import PlayedEpisode, Player, make_episode_seed
from generators.rendering import choose_renderer
from generators.rendering.endings import find_ends
from generators.rendering.prompts import PromptEncoder
from generators.rendering.renderer import Renderer
from generators.score_checks import check_score, read_score, read_scores
from generators.task import Prompt, Score
from generators.turn_checks import check_turn, read_prompt
from generators.user_code.errors import TaskRefused, UserCodeError
from generators.user_code.pool import UserCodePool
from generators.user_code.task_kinds import TaskKind
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import WorkerLimits

log = logging.getLogger("slipstream.generator")

UNBOUNDED = 1 << 30
CLOSE_S = 5.0
"""Seconds that an environment's `close` may take. Then its worker is killed."""


@dataclass(slots=True)
class Beginning:
    """The part that all episodes of a group share."""

    lease: Lease
    prompt: list[int]
    """Tokens of a one-turn task's prompt; empty for an environment and for an agent."""
    messages: Sequence[Mapping[str, Any]]
    """The messages of that prompt."""
    seed: int
    """Seed of the environments."""


@dataclass(slots=True)
class Conversation:
    """The messages of an episode so far, and what they have paid."""

    messages: list[Message] = field(default_factory=list)
    tools: Sequence[ToolSpec] = ()
    components: Counter[str] = field(default_factory=Counter)
    stop: str | None = None


def refuse_missing_code(refusal: TaskRefused) -> None:
    """Raises ValueError, with the reason, for a refusal of code that this host lacks."""
    if any(words in str(refusal) for words in ("No module named", "there is no file")):
        raise ValueError(
            f"{refusal}, on {os.uname().nodename} (code does not travel: the code and packages of tasks, "
            "environments and rewards must be on each host that generates)"
        ) from refusal


class TaskEpisodes:
    """Episodes of the run's task. Everything belongs to the episode thread."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._tokenizer, self._limits = config, tokenizer, config.episodes
        self._pool: UserCodePool
        self._renderer: Renderer
        self._encoder = PromptEncoder(tokenizer)
        self._agents: AgentEpisodes | None = None
        self._has_turns = self._scores_groups = False
        self._score_slots = asyncio.Semaphore(UNBOUNDED)
        """Places of those who score, where the task says how many may do so at a time (`max_scores`)."""
        self._has_warned_of_tools = False
        self._ends = find_ends(tokenizer) if tokenizer.chat_template else frozenset[int]()
        """Tokens that end the reply of a task of one turn, beside the model's own."""
        self._score_limit = self._limits.score_timeout_s, "episodes.score_timeout_s"

    async def open(self) -> None:
        """Raises TaskRefused or ValueError for a task that cannot be made, and ValueError for a chat template
        under which turns cannot be exact."""
        try:
            self._pool = await UserCodePool.open(
                self._config.task.name, self._config.task_arguments, WorkerLimits.from_config(self._config)
            )
        except TaskRefused as refusal:
            refuse_missing_code(refusal)
            raise
        described = self._pool.description
        self._has_turns = described.kind in (TaskKind.environment, TaskKind.environments)
        self._scores_groups = described.has_group_scores
        if self._scores_groups and self._config.algo.needs_greedy_response:
            raise ValueError(
                "algo.advantage must be another than remax where replies are scored as a group (the greedy "
                f"reply of its baseline is in none), got remax with "
                f"task.name={self._config.task.name}"
            )
        self._score_slots = asyncio.Semaphore(described.max_scores or UNBOUNDED)
        if self._has_turns:
            self._renderer = choose_renderer(self._tokenizer, self._limits)
        if described.kind is TaskKind.agent:
            self._agents = AgentEpisodes(self._config, self._pool, self._tokenizer)
            await self._agents.open()

    async def close(self) -> None:
        if self._agents is not None:
            await self._agents.close()
        if hasattr(self, "_pool"):
            await self._pool.close()

    def limit_concurrency(self, most: int) -> int:
        return most if self._agents is None else limit_agents(self._config, os.sched_getaffinity(0))

    async def begin_group(self, lease: Lease) -> Beginning:
        makes_prompt = not self._has_turns and self._agents is None
        if not makes_prompt:
            return Beginning(lease, [], (), make_episode_seed(lease))
        prompt = await self._make_prompt(lease)
        tokens = self._encoder.encode_prompt(prompt.messages, prompt.template_args)
        return Beginning(lease, tokens, prompt.messages, make_episode_seed(lease))

    async def play_episode(self, player: Player, beginning: Beginning) -> PlayedEpisode:
        if self._agents is not None:
            return await self._agents.play_agent(player, beginning.lease)
        play = self._play_turns if self._has_turns else self._play_one_turn
        return await play(player, beginning)

    async def score_group(
        self, beginning: Beginning, episodes: Sequence[PlayedEpisode]
    ) -> list[Score] | None:
        if not self._scores_groups:
            return None
        replies = [episode.branches.list_last_reply() for episode in episodes]
        records = [
            {
                "messages": list(episode.messages),
                "reward": episode.score.reward,
                "components": episode.score.components,
                "stop": episode.stop,
                "num_tokens": len(reply),
                "tokens": reply if self._pool.description.needs_tokens else [],
            }
            for episode, reply in zip(episodes, replies, strict=True)
        ]
        async with self._score_slots:
            found = await self._call_any_worker("score_group", beginning.lease, [records], self._score_limit)
        return read_scores(found, len(episodes))

    # ---- one turn

    async def _make_prompt(self, lease: Lease) -> Prompt:
        limit = self._limits.reset_timeout_s, "episodes.reset_timeout_s"
        return read_prompt(await self._call_any_worker("make_prompt", lease, [], limit))

    async def _play_one_turn(self, player: Player, beginning: Beginning) -> PlayedEpisode:
        completion = await player.ask_policy(beginning.prompt, stop_tokens=self._ends)
        player.end_sampling()
        response = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        arguments, limit = [response], self._score_limit
        async with self._score_slots:
            found = await self._call_any_worker("score_response", beginning.lease, arguments, limit)
        score = read_score(found)
        player.branches.pay_last_turn(score.reward)
        said = [*map(dict, beginning.messages), {"role": "assistant", "content": response}]
        stop = infer_stop(completion.finish_reason)
        return PlayedEpisode(branches=player.branches, score=score, stop=stop, messages=said)

    # ---- several turns

    async def _play_turns(self, player: Player, beginning: Beginning) -> PlayedEpisode:
        with player.wait_untimed():
            worker = await self._pool.take_worker()
        talk = Conversation()
        try:
            await self._converse(player, beginning, worker, talk)
        finally:
            player.end_sampling()
            await self._close_environment(worker)
            self._pool.return_worker(worker)
        score = check_score(Score(sum(player.branches.turn_rewards.values()), dict(talk.components)))
        return PlayedEpisode(
            branches=player.branches,
            score=score,
            stop=str(talk.stop),
            renderer=self._renderer.name,
            messages=talk.messages,
        )

    async def _converse(
        self, player: Player, beginning: Beginning, worker: UserWorker, talk: Conversation
    ) -> None:
        """Plays the turns of an episode, and says in `talk.stop` why it ended."""
        lease, limits = beginning.lease, self._limits
        first = await worker.call(
            "reset",
            [lease.split, lease.index, lease.seed, beginning.seed],
            limits.reset_timeout_s,
            "episodes.reset_timeout_s",
        )
        turn = check_turn(first, is_first=True)
        talk.messages += turn.messages
        talk.tools = turn.tools
        prompt = self._renderer.render_first(talk.messages, talk.tools)
        if turn.tools and not self._has_warned_of_tools:
            self._warn_of_tools(prompt, talk)
        while talk.stop is None:
            room = self._config.generators.max_model_len - len(prompt)
            if room < 1 and player.num_turns:
                talk.stop = "context_overflow"
                return
            most = self._config.sampling.max_tokens
            completion = await player.ask_policy(
                prompt,
                min(most, room) if player.num_turns else most,
                stop_tokens=self._renderer.stop_tokens,
            )
            reply = self._renderer.parse_reply(
                completion.tokens, completion.finish_reason, tools=talk.tools, turn=player.num_turns
            )
            talk.messages.append(reply.message)
            if reply.parse_error is not None:
                talk.stop = _name_cut(completion) or "parse_error"
                return
            async with self._score_slots:
                answer = await worker.call(
                    "step", [reply.message], limits.turn_timeout_s, "episodes.turn_timeout_s"
                )
            turn = check_turn(answer, is_first=False)
            player.branches.pay_last_turn(turn.reward)
            talk.components.update(turn.components)
            talk.messages += turn.messages
            if turn.done:
                talk.stop = "completed"
            elif player.num_turns == limits.max_turns:
                talk.stop = "max_turns"
            else:
                prompt = self._extend_prompt(prompt + completion.tokens, turn.messages, talk)

    def _extend_prompt(self, held: list[int], messages: Sequence[Message], talk: Conversation) -> list[int]:
        extended = self._renderer.extend_prompt(held, messages, talk.tools)
        return self._renderer.render_first(talk.messages, talk.tools) if extended is None else extended

    def _warn_of_tools(self, prompt: list[int], talk: Conversation) -> None:
        """Warns, once in a run, of tools that the policy does not see or cannot call."""
        self._has_warned_of_tools = True
        if self._limits.tool_parser is None:
            log.warning(
                "the environment has tools, and episodes.tool_parser is null: a reply stays text, and has no "
                "tool_calls"
            )
        if prompt == self._renderer.render_first(talk.messages, ()):
            log.warning("the environment has tools, and %s does not show them", self._renderer.name)

    async def _close_environment(self, worker: UserWorker) -> None:
        """Lets the environment close what it holds. Its failure costs the worker and nothing else."""
        if not worker.is_alive:
            return
        try:
            await worker.call("close", [], CLOSE_S, "generators.task_episodes.CLOSE_S")
        except UserCodeError as error:
            log.warning("an environment's close has failed: %s", error)
            await worker.kill()
        except asyncio.CancelledError:
            await worker.kill()
            raise

    async def _call_any_worker(
        self, method: str, lease: Lease, arguments: list[Any], limit: tuple[float, str]
    ) -> Any:
        """Calls a method of the task about a lease's row, in whichever worker is free. `limit` is the
        deadline in seconds and the setting that names it."""
        worker = await self._pool.take_worker()
        try:
            return await worker.call(method, [lease.split, lease.index, lease.seed, *arguments], *limit)
        finally:
            self._pool.return_worker(worker)


def _name_cut(completion: Completion) -> str | None:
    """Returns `max_tokens` for a reply that was cut off."""
    return "max_tokens" if completion.finish_reason == "length" else None
