#!/usr/bin/env bash
# Measures a weight update.
#   scripts/benchmark_sync.sh [--json FILE]           beside memcpy of the same bytes
#   scripts/benchmark_sync.sh ranks [--json FILE]     what training waits for when 1, 2 and 4 ranks publish
#   scripts/benchmark_sync.sh relays [--json FILE]    at the publisher, when several hosts fetch it
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
if [ "${1:-}" = relays ]; then
    exec python "$root/scripts/bench/benchmark_relays.py" "${@:2}"
fi
if [ "${1:-}" = ranks ]; then
    exec python "$root/scripts/bench/benchmark_publication.py" "${@:2}"
fi
exec python "$root/scripts/bench/benchmark_sync.py" "$@"
