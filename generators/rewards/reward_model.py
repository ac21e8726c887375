"""A reward model's score of a reply: `slipstream.reward_model` serves a sequence classifier."""

import time

from generators.data.rows import read_messages
from generators.environment import Row
from generators.rewards.arguments import check_count
from generators.rewards.part import Rating
from generators.rewards.servers import RequestFailed, check_server
from generators.rewards.slots import SharedSlots


class RewardModelPart:
    """Asks a reward model for a reply's score. The server batches what comes from all processes."""

    is_async = True

    def __init__(
        self,
        url: str,
        key_env: str | None = None,
        attempts: int = 8,
        attempt_timeout_s: float = 12.0,
        timeout_s: float = 25.0,
        max_concurrent: int = 64,
    ) -> None:
        """`url`: what `slipstream.reward_model` prints. `timeout_s`: for one reply, all attempts included.
        `max_concurrent`: requests at a time of all worker processes of a generator."""
        self._server = check_server(url, "/score", key_env, attempts, attempt_timeout_s, timeout_s)
        self.max_concurrent = check_count("max_concurrent", max_concurrent)
        self._slots = SharedSlots(self.max_concurrent)

    async def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises RequestFailed where there is no score."""
        messages = [*read_messages(row), {"role": "assistant", "content": reply}]
        deadline = time.monotonic() + self._server.timeout_s
        async with self._slots.hold_slot(self._server.timeout_s):
            left_s = max(0.001, deadline - time.monotonic())
            answer = await self._server.post_json({"conversations": [messages]}, left_s)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != 1 or isinstance(scores[0], bool | str):
            raise RequestFailed(f"a reward model must answer with one score, got {str(answer)[:200]}")
        return Rating(scores[0])
