#!/usr/bin/env bash
# What a weight update costs, beside memcpy of the same bytes: scripts/benchmark_sync.sh [--json FILE]
# What it costs a publisher when several hosts fetch it:        scripts/benchmark_sync.sh relays [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
if [ "${1:-}" = relays ]; then
    exec python "$root/scripts/bench/benchmark_relays.py" "${@:2}"
fi
exec python "$root/scripts/bench/benchmark_sync.py" "$@"
