#!/usr/bin/env bash
# Measures the share of the weights that changes in a step, by learning rate, and the bytes that patches save.
#   scripts/measure_patches.sh [--steps N]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/measure_patches.py" "$@"
