"""Makes the keys without which no socket of the buffer leaves the loopback interface. What is there already
is kept.

    scripts/keys.sh FOLDER                        the server's keys, and a pair for each role of a run
    scripts/keys.sh FOLDER ROLE:CLIENT ...        a pair for each client, who may do what its role may

ROLE is `generator` (joins, makes groups), `learner` (trains, publishes), `watcher` (looks on) or `operator`
(stops, rewinds). A run takes `buffer.keys=FOLDER`. On another machine that joins with generators, put
`server.key` and a generator's pair (named `generator.key` and `generator.key_secret` there) into a folder,
and name it: `scripts/launch.sh role=generators buffer.keys=FOLDER ...`. Who deletes
FOLDER/allowed/ROLE/CLIENT.key shuts that client out within a second; nothing has to be started again.
"""

import argparse
import sys
from pathlib import Path

from buffers.keys import KeyRole, make_keys


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("clients", nargs="*", default=list(KeyRole), metavar="ROLE:CLIENT")
    arguments = parser.parse_args()
    try:
        made = make_keys(arguments.folder, arguments.clients)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for path in made:
        print(f"made {path}")
    print(f"use them with buffer.keys={arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
