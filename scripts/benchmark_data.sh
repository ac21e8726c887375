#!/usr/bin/env bash
# Measures what rows from files cost: preparing, holding and reading a million of them.
#   scripts/benchmark_data.sh [--rows N] [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_data.py" "$@"
