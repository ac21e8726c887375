"""The stock client of OpenAI's protocol, as tests of the gateway use it."""

import threading
from typing import Any

import openai

from slipstream_bench.gateway_rig import OpenEpisode

USER: Any = {"role": "user", "content": "2+2?"}
NEXT: Any = {"role": "user", "content": "sure?"}


def make_client(episode: OpenEpisode) -> openai.OpenAI:
    """Returns a client that tries once, and bears a slow machine: its own limit for a connection is 5 s."""
    return openai.OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0, timeout=120)


def ask(episode: OpenEpisode, *messages: Any, **options: Any) -> Any:
    return make_client(episode).chat.completions.create(model="any", messages=messages, **options)


def wait_until(holds: Any, most_s: int = 30) -> None:
    pause = threading.Event()
    for _ in range(100 * most_s):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError(f"it did not happen in {most_s} s")
