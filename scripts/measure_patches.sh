#!/usr/bin/env bash
# How much of the weights changes in a step, by learning rate, and what patches save: scripts/measure_patches.sh [--steps N]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/measure_patches.py" "$@"
