"""Tries to join the Ray cluster at `cluster.address` before anything starts, in a process of its own.

Ray waits for minutes where nobody answers, and some of its errors end the process. The driver ends this one
after `ANSWERED_S`, and reads from it why the cluster cannot be joined.
"""

import os
import socket
import subprocess
import sys
import time

from slipstream.stop_signals import StopSignals

ANSWERED_S = 20.0
"""Seconds within which a cluster must have let a driver in."""
PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_gcs_server_request_timeout_seconds": "5"}
"""Settings of Ray with which it says in time that a driver was refused, or that its host has no node."""
CONNECTED_S = 5.0
"""Seconds within which somebody must listen at the address."""
REASON = "reason: "
"""Begins the line in which a probe says why it cannot join; others are Ray's."""
NO_NODE = "No node info found"
"""Begins Ray's error about a host without a node."""
TOKEN_MARKS = ("InvalidAuthToken", "AuthenticationError", "authentication token")
"""Texts of errors about Ray's token. Some come from its compiled code, and have no class of their own."""


def check_cluster(address: str, signals: StopSignals, answered_s: float = ANSWERED_S) -> None:
    """Raises ValueError, with the reason, when a driver on this host cannot join the cluster; Interrupted."""
    probe = subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream.cluster_check", address],
        env=os.environ | PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + answered_s
    try:
        while probe.poll() is None and time.monotonic() < deadline:
            signals.raise_if_received()
            time.sleep(0.05)
    finally:
        is_late = probe.poll() is None
        probe.kill()
        said, _ = probe.communicate()
    if probe.returncode:
        reason = explain_refusal(said, f"it has not answered within {answered_s:g} s" if is_late else "")
        raise ValueError(
            f"cluster.address must be a Ray cluster that this host can join, got {address}: {reason}"
        )


def explain_refusal(said: str, otherwise: str) -> str:
    """Returns the reason in what a probe has printed; where it says none, `otherwise` or its last line."""
    if any(mark in said for mark in TOKEN_MARKS):
        return "it asks for another token than this command has (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
    if NO_NODE in said:
        return "none of its nodes runs on this host (`ray start --address=HOST:PORT` starts one)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reasons = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)]
    return (reasons or [otherwise or f"the probe has died: {''.join(lines[-1:])}"])[0]


def join_cluster(address: str) -> None:
    """Joins the cluster as a driver, and leaves it. Raises an error, with the reason, when it cannot."""
    import ray
    from ray._private import services

    found = services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTED_S).close()
    except OSError as error:
        raise ConnectionError(f"{found} cannot be reached: {error.strerror or error}") from None
    ray.init(address=found, log_to_driver=False, logging_level="CRITICAL")
    addresses = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    if longer := [address for address in addresses if ":" in address]:
        raise ValueError(
            f"its nodes must have IPv4 addresses (`ray start --node-ip-address=...`), got {', '.join(longer)}"
        )


def find_first_cause(error: BaseException) -> BaseException:
    cause = error.__cause__
    return error if cause is None else find_first_cause(cause)


if __name__ == "__main__":
    try:
        join_cluster(sys.argv[1])
    except Exception as error:
        print(REASON + " ".join(str(find_first_cause(error)).split()))
        sys.exit(1)
