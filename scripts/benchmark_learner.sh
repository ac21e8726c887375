#!/usr/bin/env bash
# Measures a training step beside a bare FSDP2 loop, padded steps, TRL's, and the machine's bound.
#   scripts/benchmark_learner.sh [--json FILE]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare peers
export KINETO_LOG_LEVEL=6 # torch's profiler, which records the memory, is silent
exec python "$root/scripts/bench/benchmark_learner.py" "$@"
