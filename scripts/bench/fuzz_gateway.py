"""Sends forged requests to a gateway, which must answer each and keep its memory.

    scripts/fuzz_gateway.sh [--requests 100000] [--socket 3000] [--seed 0]

Most requests go to the application itself, for speed; `--socket` of them, and raw bytes that are no HTTP, go
over connections. Honest requests between them must be answered. The exit status is 1 when an answer is not in
OpenAI's form, is a fault of the gateway's own or fails to come, and when memory grows.
"""

import argparse
import random
import socket
import sys
import time

import psutil

from slipstream_bench.gateway_attack import EPISODE_REQUESTS, MAX_BODY_MB, GatewayAttack, RequestForge
from slipstream_bench.gateway_rig import GatewayRig

MEMORY_MIB = 32
"""MiB that the process may gain between a tenth of the requests and the end."""
ROUNDS = 10


def attack_application(rig: GatewayRig, count: int, seed: int) -> tuple[GatewayAttack, list[float]]:
    """Returns the attack, and the MiB of memory after each tenth of the requests."""
    attack, memory = GatewayAttack(rig, seed), []
    for _ in range(ROUNDS):
        rig.run(attack.send_requests(count // ROUNDS))
        memory.append(psutil.Process().memory_info().rss / 2**20)
    return attack, memory


def attack_socket(rig: GatewayRig, count: int, seed: int) -> int:
    """Sends forged requests over connections of their own; returns how many were answered."""
    forge, coin, answered = RequestForge(seed), random.Random(seed), 0
    place = ("127.0.0.1", int(rig.gateway.root_url.rpartition(":")[2]))
    for begun in range(0, count, EPISODE_REQUESTS):
        episode = rig.open_episode()
        for _ in range(min(EPISODE_REQUESTS, count - begun)):
            request = forge.forge_request(episode.key)
            path = request.path.encode(errors="replace").replace(b"\x00", b"%00")
            lines = [
                request.method.encode() + b" " + path + b" HTTP/1.1",
                b"host: gateway",
                b"connection: close",
                b"content-length: %d" % len(request.body),
            ]
            if request.key is not None:
                lines.append(b"authorization: " + request.key)
            raw = b"\r\n".join(lines) + b"\r\n\r\n" + request.body
            is_damaged = coin.random() < 0.1
            if is_damaged:
                raw = coin.randbytes(coin.randint(1, 500)) + raw[coin.randrange(len(raw)) :]
            elif coin.random() < 0.05:
                raw, is_damaged = raw[: coin.randrange(len(raw))], True
            answered += exchange_bytes(place, raw, ends=is_damaged)
        episode.close()
    return answered


def exchange_bytes(place: tuple[str, int], raw: bytes, ends: bool) -> bool:
    """Returns whether an HTTP answer came before the server closed the connection.

    `ends` says that nothing follows, of which the server would wait for more.
    """
    with socket.create_connection(place, timeout=60) as connection:
        try:
            connection.sendall(raw)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            return connection.recv(64).startswith(b"HTTP/1.1 ")
        # It is closed when nothing that follows could be read.
        except (ConnectionResetError, BrokenPipeError):
            return False


def run_fuzz() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--socket", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rig = GatewayRig(f"episodes.gateway.max_body_mb={MAX_BODY_MB}")
    try:
        began = time.monotonic()
        attack, memory = attack_application(rig, arguments.requests, arguments.seed)
        took_s = time.monotonic() - began
        answered = attack_socket(rig, arguments.socket, arguments.seed)
        memory.append(psutil.Process().memory_info().rss / 2**20)
        rig.run(attack.send_requests(EPISODE_REQUESTS))
    finally:
        rig.close()
    grown = memory[-1] - memory[0]
    print(f"{arguments.requests} requests in {took_s:.0f} s: {dict(attack.counts.most_common())}")
    print(f"{arguments.socket} over connections: {answered} answered")
    print(f"memory {', '.join(f'{one:.0f}' for one in memory)} MiB: {grown:+.1f} MiB")
    if grown > MEMORY_MIB:
        print(f"memory must grow by at most {MEMORY_MIB} MiB, got {grown:.1f}")
    return int(grown > MEMORY_MIB)


if __name__ == "__main__":
    sys.exit(run_fuzz())
