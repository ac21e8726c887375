"""ZeroMQ counts its names for peers on from a number that must not be the same in every process."""

import subprocess
import sys

CODE = """
import zmq
from configs.sockets import randomize_peer_names
randomize_peer_names()
context = zmq.Context()
router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
dealer.send(b"")
print(router.recv_multipart()[0].hex())
context.destroy(linger=0)
"""


def test_the_names_of_peers_cannot_be_guessed() -> None:
    """A peer that bears the name that ZeroMQ gives next aborts a server: see `randomize_peer_names`."""
    runs = [
        subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert len({run.stdout for run in runs} | {"006b8b4567\n"}) == 3
