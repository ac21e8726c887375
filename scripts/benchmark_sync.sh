#!/usr/bin/env bash
# What a weight update costs, beside memcpy of the same bytes: scripts/benchmark_sync.sh [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$(dirname "$0")/benchmark_sync.py" "$@"
