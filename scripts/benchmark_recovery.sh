#!/usr/bin/env bash
# Measures the time that a buffer takes to go on after a SIGKILL, by the length of its run.
#   scripts/benchmark_recovery.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_recovery.py" "$@"
