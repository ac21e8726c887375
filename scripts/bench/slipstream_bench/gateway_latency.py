"""The gateway's overhead: the time of a request whose reply costs nothing, as another process sees it.

python -m slipstream_bench.gateway_latency
"""

import json
import subprocess
import sys
import time

from slipstream_bench import timed_client
from slipstream_bench.gateway_rig import GatewayRig

TURNS = 8


def measure_gateway(num_requests: int = 800, reply_tokens: int = 64) -> dict[str, float]:
    """Returns `p50_ms` and `p99_ms` of a request, and `cpu_ms`, this process's own time for one.

    Conversations have 8 turns. The policy answers at once, so the time is that of HTTP, JSON, rendering,
    parsing and the record.
    """
    rig = GatewayRig("generators.max_model_len=100000")
    rig.policy.say = lambda sample: "x" * reply_tokens
    try:
        episodes = [rig.open_episode() for _ in range(max(1, num_requests // TURNS))]
        keys = [episode.key for episode in episodes]
        port = int(rig.gateway.root_url.rpartition(":")[2])
        began = time.process_time()
        client = subprocess.run(
            [sys.executable, timed_client.__file__],
            input=json.dumps({"port": port, "keys": keys, "turns": TURNS}),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        used_s = time.process_time() - began
        took = sorted(json.loads(client.stdout))
    finally:
        rig.close()
    return {
        "p50_ms": 1e3 * took[len(took) // 2],
        "p99_ms": 1e3 * took[int(len(took) * 0.99)],
        "cpu_ms": 1e3 * used_s / len(took),
    }


if __name__ == "__main__":
    print(json.dumps(measure_gateway()))
