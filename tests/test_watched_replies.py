"""Replies that an episode watches: it sees their tokens as they come, and may end them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from generators.engine import Completion, Sample
from generators.policy import EnginePolicy


class CountingEngine:
    """Samples the tokens 1, 2, 3 … of each sample, one a step, up to the sample's `max_tokens`."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[Sample, list[int]]] = {}
        self.aborted: list[str] = []

    def add_sample(self, sample: Sample) -> None:
        self.running[sample.id] = sample, []

    def step(self) -> list[Completion]:
        for _, tokens in self.running.values():
            tokens.append(len(tokens) + 1)
        full = [id for id, (sample, tokens) in self.running.items() if len(tokens) == sample.max_tokens]
        return [self._end_sample(id, "stop") for id in full]

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        self.aborted += [id for id in ids if id in self.running]
        return [self._end_sample(id, "abort") for id in ids if id in self.running]

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        return self.running[sample_id][1][start:] if sample_id in self.running else []

    def _end_sample(self, sample_id: str, reason: str) -> Completion:
        tokens = self.running.pop(sample_id)[1]
        return Completion(
            id=sample_id, tokens=tokens, logprobs=[0.0] * len(tokens), versions=[0] * len(tokens),
            finish_reason=reason,
        )  # fmt: skip


class WatchedRun:
    """Engine and episodes in one thread, step by step."""

    def __init__(self) -> None:
        self.engine: Any = CountingEngine()
        self.policy = EnginePolicy(lambda: None)
        self.aborted: list[Completion] = []

    def ask(self, number: int, watch: Callable[[list[int]], bool] | None, most: int = 9) -> Any:
        sample = Sample(id=f"{number}/0/0", prompt=[1], max_tokens=most, seed=0)
        return asyncio.ensure_future(self.policy.sample_turn(sample, watch))

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)
            if self.policy.has_requests:
                self.aborted += self.policy.exchange_samples(self.engine, may_add=True)
            for completion in self.engine.step():
                self.policy.take_completion(completion)
            self.policy.show_progress(self.engine)
        await asyncio.sleep(0.001)


def test_tokens_are_shown_in_order_once_and_several_at_a_time_to_one_that_is_slow() -> None:
    async def play() -> None:
        run, shown = WatchedRun(), list[list[int]]()

        def note(tokens: list[int]) -> bool:
            shown.append(tokens)
            return False

        reply = run.ask(1, note)
        await run.step(2)
        assert shown == [[1], [2]]
        for _ in range(3):  # the episode thread has other work
            run.engine.step()
            run.policy.show_progress(run.engine)
        await asyncio.sleep(0.001)
        await run.step(20)
        assert shown[2:4] == [[3], [4, 5, 6]] and sum(shown, [])[:6] == [1, 2, 3, 4, 5, 6]
        completion = await reply
        assert (completion.tokens, completion.finish_reason) == (list(range(1, 10)), "stop")
        assert not run.engine.aborted and not run.policy._watched

    asyncio.run(play())


def test_one_that_has_enough_ends_its_own_sample_which_counts_with_all_its_tokens() -> None:
    async def play() -> None:
        run = WatchedRun()
        first, second = run.ask(1, lambda tokens: 3 in tokens), run.ask(2, lambda tokens: False)
        await run.step(4)
        completion = await first
        assert completion.finish_reason == "abort" and completion.tokens[:3] == [1, 2, 3]
        assert run.aborted == [completion] and run.engine.aborted == ["1/0/0"]
        await run.step(9)
        assert len((await second).tokens) == 9

    asyncio.run(play())


def test_one_that_has_enough_when_the_reply_ends_itself_aborts_nothing() -> None:
    async def play() -> None:
        run = WatchedRun()
        reply = run.ask(1, lambda tokens: 3 in tokens, most=4)
        await asyncio.sleep(0)
        run.policy.exchange_samples(run.engine, may_add=True)
        for _ in range(3):
            run.engine.step()
        run.policy.show_progress(run.engine)
        [completion] = run.engine.step()
        run.policy.take_completion(completion)
        assert (await reply).finish_reason == "stop"
        await run.step(2)
        assert not run.engine.aborted and not run.policy.has_requests

    asyncio.run(play())


def test_a_watch_that_fails_fails_its_own_turn_and_its_sample_is_aborted() -> None:
    def fail(tokens: list[int]) -> bool:
        raise RuntimeError("no such text")

    async def play() -> None:
        run = WatchedRun()
        first, second = run.ask(1, fail), run.ask(2, None)
        await run.step(3)
        with pytest.raises(RuntimeError, match="no such text"):
            await first
        assert run.engine.aborted == ["1/0/0"]
        await run.step(9)
        assert len((await second).tokens) == 9

    asyncio.run(play())


def test_one_that_is_withdrawn_is_shown_nothing_more() -> None:
    async def play() -> None:
        run, shown = WatchedRun(), list[int]()
        first = run.ask(1, lambda tokens: bool(shown.extend(tokens)))
        second = run.ask(2, lambda tokens: bool(shown.extend(tokens)))
        await run.step(2)
        first.cancel()
        run.policy.withdraw_lease(run.engine, lambda sample_id: sample_id == "2/0/0")
        await asyncio.sleep(0.001)
        num_shown = len(shown)
        await run.step(5)
        assert len(shown) == num_shown and sorted(run.engine.aborted) == ["1/0/0", "2/0/0"]
        second.cancel()

    asyncio.run(play())
