#!/usr/bin/env bash
# Trains one long sequence in several layouts of ranks: same numbers as one rank, memory as planned.
#   scripts/benchmark_long.sh [--tokens N] [--layouts NAME ...] [--checkpointing] [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare megatron
exec python "$root/scripts/bench/benchmark_long.py" "$@"
