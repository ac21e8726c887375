"""Makes the keys without which no socket of the buffer leaves the loopback interface. What is there already is kept.

    scripts/keys.sh FOLDER [CLIENT ...]      server's keys, and a pair for each client (default: client)

On another machine that joins with generators, put `server.key` and the pair of one client (named `client.key` and
`client.key_secret` there) into a folder, and name it: `scripts/launch.sh role=generators buffer.keys=FOLDER ...`.
"""

import argparse
from pathlib import Path

from buffers.keys import make_keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("clients", nargs="*", default=["client"], metavar="CLIENT")
    arguments = parser.parse_args()
    for path in make_keys(arguments.folder, arguments.clients):
        print(f"made {path}")
    print(f"use them with buffer.keys={arguments.folder}")


if __name__ == "__main__":
    main()
