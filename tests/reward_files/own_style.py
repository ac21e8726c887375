"""Rewards in Slipstream's own form."""

import asyncio


def rate_reply(row, reply, bonus=0.0):
    return float(reply == row["answer"]) + bonus


async def rate_later(row, reply):
    await asyncio.sleep(0)
    return {"reward": len(reply), "is_empty": not reply}


def rank_replies(row, replies):
    order = sorted(range(len(replies)), key=lambda index: len(replies[index]))
    return [order.index(index) for index in range(len(replies))]


class Grader:
    async def __call__(self, row, reply):
        return 0.5


grade = Grader()
