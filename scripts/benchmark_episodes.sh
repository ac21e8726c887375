#!/usr/bin/env bash
# Measures what turns, tool waits and scores cost an engine.
#   scripts/benchmark_episodes.sh [--groups 8] [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_episodes.py" "$@"
