"""The episodes of an agent task: the agent runs in a worker process and asks the policy through the gateway.

    open a session ─▶ run_agent, or agent_command ─▶ score_agent ─▶ close the session

An agent that fails, or that never asks the policy, is a failed attempt at its group. None becomes a reward of
0.
"""

import logging
from collections.abc import Collection
from typing import Any

from buffers.messages import Lease
from configs.schema import Config
from generators.gateway.server import Gateway
from generators.gateway.session import GatewaySession
from generators.group import PlayedEpisode, Player
from generators.plain_values import describe_error, show_value
from generators.rendering import choose_renderer
from generators.score_checks import read_score
from generators.task import Score
from generators.user_code.errors import UserCodeError
from generators.user_code.pool import UserCodePool
from generators.user_code.user_worker import UserWorker

log = logging.getLogger("slipstream.generator")


AGENTS_PER_PROCESSOR = 16
"""Agents wait for the policy most of their time. A Python process with OpenAI's client takes about 60 MB."""


class AgentFailed(UserCodeError):
    """An agent has ended without an episode that can be trained on."""


class AgentEpisodes:
    """Plays the episodes of agents. Everything belongs to the episode thread."""

    def __init__(self, config: Config, pool: UserCodePool, tokenizer: Any) -> None:
        """Raises ValueError for a chat template under which turns cannot be exact."""
        self._limits, self._pool = config.episodes, pool
        self._renderer = choose_renderer(tokenizer, config.episodes)
        self.gateway = Gateway(config, self._renderer, tokenizer)

    async def open(self) -> None:
        """Raises ValueError for an address that cannot be listened at."""
        await self.gateway.open()

    async def close(self) -> None:
        await self.gateway.close()

    async def play_agent(self, player: Player, lease: Lease) -> PlayedEpisode:
        """Runs an agent to its end. Raises UserCodeError for one that fails or asks nothing."""
        with player.wait_untimed():
            worker = await self._pool.take_worker()
        try:
            async with self.gateway.open_session(player) as (key, session):
                outcome = await self._run_agent(worker, lease, key)
            player.end_sampling()
            self._require_turns(session, outcome)
            score = await self._score_agent(worker, lease, outcome)
        finally:
            player.end_sampling()
            # Nothing that an agent has started outlives its episode.
            await worker.kill()
            self._pool.return_worker(worker)
        player.branches.pay_last_turn(score.reward)
        if len(player.branches.branches) > 1:
            log.debug(
                "sample %d of lease %d: %d branches in %d turns",
                player.index,
                lease.id,
                len(player.branches.branches),
                player.num_turns,
            )
        return PlayedEpisode(
            branches=player.branches,
            score=score,
            stop=find_stop(session),
            renderer=self._renderer.name,
            messages=session.messages,
        )

    async def _run_agent(self, worker: UserWorker, lease: Lease, key: str) -> Any:
        base_url = f"{self.gateway.root_url}/v1"
        return await worker.call(
            "run_agent",
            [lease.split, lease.index, lease.seed, base_url, key],
            self._limits.timeout_s,
            "episodes.timeout_s",
        )

    def _require_turns(self, session: GatewaySession, outcome: Any) -> None:
        if session.failure is not None:
            raise AgentFailed(
                f"the gateway could not answer an agent: {describe_error(session.failure)}"
            ) from session.failure
        if session.player.num_turns == 0:
            raise AgentFailed(
                "an agent must ask the policy at least once (OPENAI_BASE_URL and OPENAI_API_KEY, or base_url "
                f"and api_key), got no answered request and the outcome {show_value(outcome)}"
            )

    async def _score_agent(self, worker: UserWorker, lease: Lease, outcome: Any) -> Score:
        found = await worker.call(
            "score_agent",
            [lease.split, lease.index, lease.seed, outcome],
            self._limits.score_timeout_s,
            "episodes.score_timeout_s",
        )
        return read_score(found)


def limit_agents(config: Config, processors: Collection[int]) -> int:
    """Returns how many agents one generator runs side by side: each is a process with a memory of its own."""
    if config.episodes.max_concurrent is not None:
        return config.episodes.max_concurrent
    most = max(config.samples_per_group, AGENTS_PER_PROCESSOR * len(processors))
    if most >= config.max_episodes:
        return config.max_episodes
    log.info(
        "runs at most %d agents side by side, %d for each processor of this host; episodes.max_concurrent "
        "sets another number",
        most,
        AGENTS_PER_PROCESSOR,
    )
    return most


def find_stop(session: GatewaySession) -> str:
    """Returns why an agent's episode ended, a word of `buffers.trajectory`."""
    if session.stop is not None:
        return session.stop
    if session.last_reason == "length":
        return "max_tokens"
    return "parse_error" if session.ends_in_parse_error else "completed"
