"""A taskset of verifiers 0.4 as an agent: it runs in an environment of its own (`scripts/verifiers.sh`).

scripts/verifiers.sh tests/verifiers_agent.py FOLDER_OF_TOKENIZER
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from renderers import Qwen3RendererConfig  # type: ignore[import-not-found]
from verifiers.v1.agent import Agent  # type: ignore[import-not-found]
from verifiers.v1.clients import TrainClientConfig  # type: ignore[import-not-found]
from verifiers.v1.configs.agent import AgentConfig  # type: ignore[import-not-found]
from verifiers.v1.harnesses.null import NullHarnessConfig  # type: ignore[import-not-found]
from verifiers.v1.runtimes import SubprocessConfig  # type: ignore[import-not-found]


class LetterData(vf.TaskData):  # type: ignore[misc]
    letter: str = ""


class LetterTask(vf.Task[LetterData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def has_letter(self, trace: Any) -> float:
        return float(self.data.letter in (trace.last_reply or ""))


class LetterTaskset(vf.Taskset[LetterTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[LetterTask]:
        for letter in "ABCDEFGH":
            yield LetterTask(LetterData(prompt=f"Write {letter}.", letter=letter), self.config.task)


async def play_task(number: int, tokenizer: str) -> float:
    tasks = list(LetterTaskset(vf.TasksetConfig(id="letters")).take(8))
    client = TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=tokenizer,
    )
    agent = Agent(
        AgentConfig(
            model="policy",
            client=client,
            harness=NullHarnessConfig(id="null"),
            runtime=SubprocessConfig(),
            max_turns=2,
        )
    )
    async with agent:
        trace = await asyncio.wait_for(agent.run(tasks[number % 8]), 300)
    assert not trace.errors, trace.errors
    return float(trace.reward)


if __name__ == "__main__":
    row = json.loads(os.environ["SLIPSTREAM_ROW"])
    print(asyncio.run(play_task(row["index"], sys.argv[1])))
