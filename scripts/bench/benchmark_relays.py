"""Measures what a version costs its publisher when several hosts fetch it at once, with relays and without.

    scripts/benchmark_sync.sh relays [--megabytes 1000] [--hosts 1 2 6] [--link-mb-per-s 100] [--json FILE]

A host is a process of this machine, with a folder and a server of its own. Every host begins when the version
is announced to it. The seconds end when the last host has the version whole (it is not verified yet). Each
case is measured twice. At first servers send as fast as this machine can, whose cores all hosts share. Then
each host and the publisher have a link of so many MB/s out of them, which is the case that relays are for: a
server sleeps as long as such a link would take for the bytes it sends.

    copies      the bytes that the publisher has sent, as a multiple of the version's
    seconds     from the announcement until the last host has all
"""

import argparse
import json
import multiprocessing
import queue
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sync.announcement import announce_version, parse_announcement
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.stream import whole_parts
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
from sync.transports.tcp import FetchingEnd

spawn = multiprocessing.get_context("spawn")


class ThrottledServer(SnapshotServer):
    """Server that sends at most `mb_per_s` MB/s; 0 means without a limit."""

    mb_per_s = 0.0

    def _make_reply(self, request: Any) -> Any:
        reply, payload = super()._make_reply(request)
        if self.mb_per_s:
            time.sleep(sum(len(part) for part in payload) / 1e6 / self.mb_per_s)
        return reply, payload


def run_publisher(megabytes: int, mb_per_s: float, orders: Any, answers: Any) -> None:
    """Plays the learner in a process of its own.

    An order with a number publishes that version and answers with its announcement. The order after it
    answers with the copies that have been sent. None ends the process.
    """
    ThrottledServer.mb_per_s = mb_per_s
    folder = shared_memory_folder("benchmark-relays")
    server = ThrottledServer(folder)
    publisher = Publisher(folder, "benchmark", ends=[server], keep=1)
    weights = {f"layer.{n}.weight": torch.randn(megabytes // 20, 250_000) for n in range(20)}
    try:
        for version in iter(orders.get, None):
            before = server.bytes_sent
            manifest = publisher.publish_version(version, whole_parts(weights))
            announced = parse_announcement(announce_version(manifest, server.address))._replace(
                host="another host"
            )
            answers.put("#".join(announced))
            orders.get()
            answers.put((server.bytes_sent - before) / manifest.num_bytes)
            for tensor in weights.values():
                tensor.add_(1)
    finally:
        publisher.close()


def run_host(number: int, mb_per_s: float, relays: bool, announcements: Any, done: Any) -> None:
    """Plays a host in a process of its own: fetches each announced version."""
    ThrottledServer.mb_per_s = mb_per_s
    fetcher = Fetcher(shared_memory_folder(f"benchmark-relays-{number}"), timeout_s=60)
    end = FetchingEnd(fetcher, ThrottledServer if relays else None)
    fetcher.open_folder()
    done.put(number)
    for announced in iter(announcements.get, None):
        end.locate_manifest(parse_announcement(announced))
        done.put(number)
    end.close()


def measure_relays(megabytes: int, hosts: int, mb_per_s: float, relays: bool) -> tuple[float, float]:
    """Returns copies that the publisher sent and seconds until all hosts had the version.

    Without a link's limit both are those of the second of two versions: the first takes memory from the
    kernel, as a first version does.
    """
    orders, answers, done = spawn.Queue(), spawn.Queue(), spawn.Queue()
    inboxes = [spawn.Queue() for _ in range(hosts)]
    processes = [
        spawn.Process(target=run_publisher, args=(megabytes, mb_per_s, orders, answers), daemon=True)
    ]
    processes += [
        spawn.Process(target=run_host, args=(number, mb_per_s, relays, inbox, done), daemon=True)
        for number, inbox in enumerate(inboxes)
    ]
    try:
        for process in processes:
            process.start()
        for _ in inboxes:
            done.get(timeout=600)
        for version in range(1 if mb_per_s else 2):
            orders.put(version)
            announced = answers.get(timeout=600)
            began = time.perf_counter()
            for inbox in inboxes:
                inbox.put(announced)
            for _ in inboxes:
                done.get(timeout=600)
            seconds = time.perf_counter() - began
            orders.put("count")
            copies = answers.get(timeout=60)
        for inbox in (*inboxes, orders):
            inbox.put(None)
        for process in processes:
            process.join(timeout=60)
    except queue.Empty:
        raise RuntimeError("a process of the benchmark has not answered") from None
    finally:
        for process in processes:
            process.kill()
        for left in shared_memory_folder("benchmark-relays").parent.glob("slipstream-benchmark-relays*"):
            shutil.rmtree(left, ignore_errors=True)
    return copies, seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--link-mb-per-s", type=float, default=100.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    table = Table(
        "hosts", "link, MB/s", "relays", "copies", "seconds", title=f"{options.megabytes} MB to several hosts"
    )
    found = []
    for mb_per_s in (0.0, options.link_mb_per_s):
        for hosts in options.hosts:
            for relays in (True, False):
                copies, seconds = measure_relays(options.megabytes, hosts, mb_per_s, relays)
                found.append([hosts, mb_per_s, relays, copies, seconds])
                link, way = f"{mb_per_s:.0f}" if mb_per_s else "-", "yes" if relays else "no"
                table.add_row(str(hosts), link, way, f"{copies:.2f}", f"{seconds:.2f}")
                Console(stderr=True).print(*found[-1])
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
