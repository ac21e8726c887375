#!/usr/bin/env bash
# How long a buffer takes to go on after a SIGKILL, by the length of its run. See scripts/bench/benchmark_recovery.py --help.
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark_recovery.py" "$@"
