#!/usr/bin/env bash
# Measures the buffer's speed beside raw pyzmq, Ray and TransferQueue, in one run.
#   scripts/benchmark_buffer.sh [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_buffer.py" "$@"
