"""Agents that the tests train: with the stock client, as a shell script, and ones that go wrong."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from generators.environment import Row
from generators.task import Score

SCRIPT = r"""
ask() {
    curl --silent --fail "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d "$1"
}
first=$(ask '{"model": "policy", "messages": [{"role": "user", "content": "hello"}]}') || exit 3
echo "the agent got $first"
reply=$(printf '%s' "$first" | sed 's/.*"message":\({[^}]*}\).*/\1/')
more='{"role": "user", "content": "more"}'
ask '{"messages": [{"role": "user", "content": "hello"}, '"$reply, $more]}" || exit 4
echo
echo '{"reward": 0.5, "row": '"${#SLIPSTREAM_ROW}"'}'
"""


class NumberedRows:
    def make_row(self, split: str, index: int, seed: int) -> Row:
        return {"split": split, "index": index, "seed": seed}


class StockClientAgent(NumberedRows):
    """Asks three times with the client of OpenAI, and is paid one for each reply."""

    name = "stock"

    async def run_agent(self, row: Row, base_url: str, api_key: str) -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": f"row {row['index']}"}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(model="policy", messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        return {"replies": len(messages) // 2}

    def score_agent(self, row: Row, outcome: Any) -> Score:
        return Score(float(outcome["replies"]), {"index": float(row["index"])})


class ShellAgent(NumberedRows):
    """Speaks through curl."""

    name = "shell"
    agent_command = ["bash", "-c", SCRIPT]


class UnrulyAgent(NumberedRows):
    """Goes wrong in a way that the row decides."""

    name = "unruly"

    def __init__(self, log: str) -> None:
        self._log = Path(log)

    def run_agent(self, row: Row, base_url: str, api_key: str) -> Any:
        match row["index"]:
            case 1:
                return 1.0  # asked nothing
            case 2:
                raise RuntimeError("the agent is lost")
            case 4:
                return self._ask(base_url, api_key) and {"won": True}
            case 5:
                return self._ask(base_url, api_key) and float("nan")
            case 6:
                self._ask(base_url, api_key)
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                self._note(child.pid)
                time.sleep(1000)
            case 7:
                return self._ask(base_url, "wrong key")
            case 8:
                self._ask(base_url, api_key)
                os._exit(9)
        self._ask(base_url, api_key)
        self._note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        return 1.0

    def _ask(self, base_url: str, api_key: str) -> bool:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        return True

    def _note(self, pid: int) -> None:
        with self._log.open("a") as log:
            print(pid, file=log)


class FailingCommand(NumberedRows):
    name = "failing"
    agent_command = ["bash", "-c", "echo 1.0; exit 7"]


class EndlessAgent(NumberedRows):
    """Asks until it is refused: the run says how many turns an episode has."""

    name = "endless"

    def run_agent(self, row: Row, base_url: str, api_key: str) -> float:
        client, asked = openai.OpenAI(base_url=base_url, api_key=api_key), 0
        try:
            while True:
                client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": json.dumps(asked)}]
                )
                asked += 1
        except openai.BadRequestError:
            return float(asked)


class VerifiersAgent(NumberedRows):
    """A taskset of verifiers, in an environment of its own."""

    name = "verifiers"

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer

    @property
    def agent_command(self) -> list[str]:
        tests = Path(__file__).parent
        script = tests.parent / "scripts" / "verifiers.sh"
        return [str(script), str(tests / "verifiers_agent.py"), self._tokenizer]


ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "2+2?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
RESULT = {"role": "tool", "content": "4"}
ANSWER = "the answer is four"
COUNTING = {"role": "user", "content": "count"}
COUNTED = "one two three four five six"


class ToolCaller(NumberedRows):
    """Calls a tool with the stock client and goes on with its result, in row 1 once a file is there. Then it
    counts in a stream, and once more up to a stop."""

    name = "tool caller"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def run_agent(self, row: Row, base_url: str, api_key: str) -> dict[str, float]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            create: Any = client.chat.completions.create
            first = await create(model="policy", messages=[QUESTION], tools=[ADD])
            message = first.choices[0].message
            assert message.tool_calls and first.choices[0].finish_reason == "tool_calls", message
            [call] = message.tool_calls
            assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2}
            (self._folder / f"called-{row['index']}-{api_key[:8]}").touch()
            while row["index"] == 1 and not (self._folder / "go").exists():
                await asyncio.sleep(0.02)
            result = {**RESULT, "tool_call_id": call.id}
            second = await create(model="policy", messages=[QUESTION, message, result], tools=[ADD])
            assert second.choices[0].message.content == ANSWER, second
            stream = await create(model="policy", messages=[COUNTING], stream=True)
            pieces = [chunk.choices[0].delta.content async for chunk in stream]
            assert "".join(filter(None, pieces)) == COUNTED, pieces
            stopped = await create(model="policy", messages=[COUNTING], stop=["four"])
            assert stopped.choices[0].message.content == "one two three ", stopped
        return {"reward": 1.0, "pieces": float(len(list(filter(None, pieces))))}


class ForgetfulAgent(NumberedRows):
    """Adds one number to the next, each time in a conversation that knows nothing of the sums before, so that
    an episode has as many branches as sums: two or three."""

    name = "forgetful"

    async def run_agent(self, row: Row, base_url: str, api_key: str) -> dict[str, Any]:
        draw = random.Random(f"{row['seed']}/{row['split']}/{row['index']}")
        right = 0
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(count := draw.choice([2, 3])):
                question = f"{(a := draw.randrange(10))}+{(b := draw.randrange(10))}="
                answer = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": question}]
                )
                right += (answer.choices[0].message.content or "").strip() == str(a + b)
        return {"reward": right / count, "sums": float(count)}

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        draw = random.Random(seed)
        while True:
            a, b = draw.randrange(10), draw.randrange(10)
            yield f"{a}+{b}=", str(a + b)
