"""An agent whose groups have more rows than episodes, and which leaves a process behind in each: what
`chaos_run.py` trains where it trains no single replies."""

import json
import random
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

from generators.environment import Row

NUM_SUMS = 2


class SummingAgent:
    """Adds one number to the next, each time in a conversation that knows nothing of the sums before: each
    sum is a branch of its episode. A tool, a program of its own, says what is right."""

    name = "summing"

    def make_row(self, split: str, index: int, seed: int) -> Row:
        draw = random.Random(f"{seed}/{split}/{index}")
        return {"sums": [[draw.randrange(10), draw.randrange(10)] for _ in range(NUM_SUMS)]}

    def run_agent(self, row: Row, base_url: str, api_key: str) -> float:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)  # it must end with the episode
        sums: Any = row["sums"]
        right = 0
        for a, b in sums:
            tool = subprocess.run(["expr", str(a), "+", str(b)], capture_output=True, text=True, check=False)
            right += ask_policy(base_url, api_key, f"{a}+{b}=").strip() == tool.stdout.strip()
        return right / NUM_SUMS

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        draw = random.Random(seed)
        while True:
            a, b = draw.randrange(10), draw.randrange(10)
            yield f"{a}+{b}=", str(a + b)


def ask_policy(base_url: str, api_key: str, question: str) -> str:
    asked = {"model": "policy", "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""
