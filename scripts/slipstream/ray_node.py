"""Makes this host a node of a Ray cluster, for launchers that start the same program on each host of a job.

    scripts/cluster/node.sh head --nodes=3 --peer=OTHER_HOST scripts/launch.sh cluster.address=auto ...
    scripts/cluster/node.sh join HEAD_HOST:PORT

The head waits until all nodes are there, runs the command, and returns its exit status. The others end when
the head has ended. All processes of a node end with this one, however it ends.

A scheduler that stops a job sends SIGTERM to everything at once. Ray would end before the run has written its
checkpoint, so its processes do not see the signal: the command does, and the node stands until it has ended.
Generators see it too: they hand in what they have begun.
`RAY_AUTH_TOKEN` is the token of the cluster; make one for each job (`openssl rand -hex 20`).
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import psutil

from slipstream.agent import SET_PARENT_DEATH_SIGNAL
from slipstream.stop_signals import KILLED

PORT = 6379
WAITED_S = 600.0
"""Seconds in which all nodes must be there: the first start on a host may install the environment."""
NAMED_S = 15.0
"""Seconds between two lines about what is waited for."""
CONNECTED_S = 5.0
GONE_S = 30.0
"""Seconds without a way to the head after which a node ends. A head that has ended is noticed at once."""
SLICE_S = 0.2
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NodeFailed(Exception):
    """The cluster did not come up, with the reason."""


def main() -> int:
    options = parse_arguments()
    os.environ["RAY_AUTH_MODE"] = "token"
    if not os.environ.get("RAY_AUTH_TOKEN"):
        print("RAY_AUTH_TOKEN must be set, the same on every host (`openssl rand -hex 20`)", file=sys.stderr)
        return 2
    # Before any thread or process: all of them inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        return lead_cluster(options) if options.part == "head" else join_cluster(options)
    except NodeFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    except Stopped:
        return KILLED


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--cpus", type=int, default=len(os.sched_getaffinity(0)), help="processes of Ray here"
    )
    common.add_argument("--interface", help="network interface of this host's address")
    common.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="for placement.learner, .generators"
    )
    common.add_argument(
        "--wait", type=float, default=WAITED_S, metavar="S", help="seconds until all are there"
    )
    parts = parser.add_subparsers(dest="part", required=True)
    head = parts.add_parser("head", parents=[common])
    head.add_argument("--nodes", type=int, default=1, help="nodes of the cluster, with this one")
    head.add_argument("--peer", help="another host: this one's address is that on the way there")
    head.add_argument("--port", type=int, default=PORT)
    head.add_argument("command", nargs=argparse.REMAINDER)
    join = parts.add_parser("join", parents=[common])
    join.add_argument("head", metavar="HEAD_HOST:PORT")
    options = parser.parse_args()
    if options.part == "join" and not re.fullmatch(r"[^:]+:\d{1,5}", options.head):
        parser.error(f"the head must be HOST:PORT, got {options.head}")
    if options.part == "head" and not shutil.which(next(iter(options.command), "")):
        parser.error(
            f"the head must have a command that can be run, got {' '.join(options.command) or 'none'}"
        )
    if wrong := [label for label in options.label if not re.fullmatch(r"[^=]+=[^=]+", label)]:
        parser.error(f"--label must be KEY=VALUE, got {' '.join(wrong)}")
    return options


class Stopped(Exception):
    """A signal has come while nothing runs yet that would have to be told."""


def lead_cluster(options: argparse.Namespace) -> int:
    """Starts the head, waits for the other nodes, and runs the command. Returns its exit status."""
    address = find_address(options.interface, options.peer)
    node = start_ray(options, address, options.port)
    try:
        wait_until(
            lambda: count_nodes(node.gcs_address) >= options.nodes, options.wait,
            lambda: f"{count_nodes(node.gcs_address)} of {options.nodes} nodes at {node.gcs_address}",
        )  # fmt: skip
        print(f"{options.nodes} nodes at {node.gcs_address}: {' '.join(options.command)}", flush=True)
        return run_command(options.command, node.gcs_address)
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def join_cluster(options: argparse.Namespace) -> int:
    """Joins the cluster, and stays until the head has gone."""
    name, _, port = options.head.rpartition(":")
    last = "no answer yet"

    def reaches_head() -> bool:
        nonlocal last
        try:
            socket.create_connection((name, int(port)), CONNECTED_S).close()
        except OSError as error:
            last = str(error)
            return False
        return True

    wait_until(reaches_head, options.wait, lambda: f"the head at {options.head}: {last}")
    head = socket.gethostbyname(name)
    node = start_ray(options, find_address(options.interface, head), int(port), head)
    (raylet,) = [one for one in psutil.Process().children() if one.name() == "raylet"]
    try:
        silent_since: float | None = None
        # SIGTERM is the run's business: it ends, and then the head does.
        while receive_signal([signal.SIGINT], 1.0) is None:
            if not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE:
                raise NodeFailed(f"Ray's process on this host has ended (logs: {node.get_logs_dir_path()})")
            try:
                socket.create_connection((head, int(port)), CONNECTED_S).close()
                silent_since = None
            except ConnectionRefusedError:
                return 0  # it has ended
            except OSError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > GONE_S:
                    raise NodeFailed(f"the head at {options.head} is gone: {error}") from None
        return KILLED
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def start_ray(options: argparse.Namespace, address: str, port: int, head: str | None = None) -> Any:
    """Starts Ray's processes at this address, as the head or for the cluster of `head`."""
    from slipstream.cluster import start_node

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        return start_node(
            options.cpus,
            address=None if head is None else f"{head}:{port}",
            node_ip_address=address,
            gcs_server_port=port if head is None else None,
            labels=dict(label.partition("=")[::2] for label in options.label),
        )
    except Exception as error:
        raise NodeFailed(f"Ray does not start at {address}: {error}") from error


def count_nodes(gcs_address: str) -> int:
    import ray
    from ray._private.state import GlobalState

    state = GlobalState()
    state._initialize_global_state(
        ray._raylet.GcsClientOptions.create(
            gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
    )
    return sum(node["Alive"] for node in state.node_table())


def find_address(interface: str | None, peer: str | None) -> str:
    """Returns this host's IPv4 address: of the interface, else on the way to the peer, else of the loopback
    interface."""
    if interface is not None:
        places = psutil.net_if_addrs().get(interface, [])
        found = [place.address for place in places if place.family == socket.AF_INET]
        if not found:
            known = ", ".join(psutil.net_if_addrs())
            raise NodeFailed(f"--interface must have an IPv4 address, got {interface} (there are {known})")
        return found[0]
    if peer is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # sends nothing
        except OSError as error:
            raise NodeFailed(f"--peer must be a host that this one reaches, got {peer}: {error}") from None
        return str(probe.getsockname()[0])


def receive_signal(numbers: Collection[int], timeout_s: float) -> int | None:
    """Returns a blocked signal that has come. Not `signal.sigtimedwait`, which names any signal when the
    process was stopped for longer than the timeout."""
    time.sleep(timeout_s)
    received = signal.sigpending() & set(numbers)
    return signal.sigwait(received) if received else None


def wait_until(holds: Callable[[], bool], limit_s: float, describe: Callable[[], str]) -> None:
    """Waits, and says now and then what for. Raises NodeFailed after `limit_s`, Stopped at a signal."""
    began = named = time.monotonic()
    while not holds():
        if receive_signal(FORWARDED, SLICE_S) is not None:
            raise Stopped
        now = time.monotonic()
        if now - began > limit_s:
            raise NodeFailed(f"the cluster must be there within {limit_s:g} s, got: {describe()}")
        if now - named > NAMED_S:
            named = now
            print(f"waiting: {describe()}", flush=True)


def run_command(command: Sequence[str], gcs_address: str) -> int:
    """Runs the command, and hands signals on to it. Returns its exit status."""
    c_library = ctypes.CDLL(None)

    def prepare_command() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        c_library.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)

    process = subprocess.Popen(
        command,
        env=os.environ | {"RAY_ADDRESS": gcs_address},
        preexec_fn=prepare_command,
        process_group=0,  # a terminal sends Ctrl-C to all of a group, and it would come twice
    )
    while process.poll() is None:
        if (received := receive_signal(FORWARDED, SLICE_S)) is not None:
            process.send_signal(received)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


if __name__ == "__main__":
    sys.exit(main())
