#!/usr/bin/env bash
# Sends a million broken messages to the sockets of a run that goes on meanwhile.
#   scripts/fuzz.sh [--messages 1000000] [--seed 0]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/fuzz.py" "$@"
