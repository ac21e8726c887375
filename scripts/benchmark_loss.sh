#!/usr/bin/env bash
# Measures the loss side of a step beside one log-softmax of as many tokens.
#   scripts/benchmark_loss.sh [--tokens N] [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
export KINETO_LOG_LEVEL=6 # torch's profiler, which records the memory, is silent
exec python "$root/scripts/bench/benchmark_loss.py" "$@"
