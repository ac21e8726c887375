#!/usr/bin/env bash
# Asynchronous against on-policy training on the same work: a table, a plot, and with --json FILE the figures.
#   scripts/benchmark.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark.py" "$@"
