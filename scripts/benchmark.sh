#!/usr/bin/env bash
# Asynchronous against on-policy training on the same work: tables, and pictures and figures in --folder.
#   scripts/benchmark.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/benchmark.py" "$@"
