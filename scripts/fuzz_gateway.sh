#!/usr/bin/env bash
# Sends a hundred thousand forged requests to the gateway of agents.
#   scripts/fuzz_gateway.sh [--requests 100000] [--socket 3000] [--seed 0]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/fuzz_gateway.py" "$@"
