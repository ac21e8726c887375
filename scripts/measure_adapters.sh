#!/usr/bin/env bash
# What publishing adapters alone saves, and what merging costs a host: scripts/measure_adapters.sh [--rounds N]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/measure_adapters.py" "$@"
