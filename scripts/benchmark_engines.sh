#!/usr/bin/env bash
# Measures the inference engines beside each other: tokens a second, start and updates.
#   scripts/benchmark_engines.sh [--repeats 3] [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_engines.py" "$@"
