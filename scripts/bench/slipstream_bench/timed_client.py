"""A client that times its requests to a gateway. It imports nothing of the project, so it starts at once."""

import json
import sys
import time
from http.client import HTTPConnection
from typing import Any


def time_requests(port: int, keys: list[str], turns: int) -> list[float]:
    """Holds a conversation of `turns` turns with each key; returns the seconds of each request."""
    took, connection = [], HTTPConnection("127.0.0.1", port)
    for key in keys:
        headers, messages = {"Authorization": f"Bearer {key}"}, list[Any]()
        for turn in range(turns):
            messages.append({"role": "user", "content": f"turn {turn}"})
            body = json.dumps({"model": "policy", "messages": messages})
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse().read()
            took.append(time.perf_counter() - began)
            messages.append(json.loads(answer)["choices"][0]["message"])
    return took


if __name__ == "__main__":
    print(json.dumps(time_requests(**json.load(sys.stdin))))
