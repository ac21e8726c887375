#!/usr/bin/env bash
# Measures the bytes and time that publishing adapters alone saves, and the cost of merging them on a host.
#   scripts/measure_adapters.sh [--rounds N]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/measure_adapters.py" "$@"
