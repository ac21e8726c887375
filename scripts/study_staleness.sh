#!/usr/bin/env bash
# Measures the cost of staleness for each algorithm on the tiny task: a table, a plot, docs/staleness.md.
#   scripts/study_staleness.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/study_staleness.py" "$@"
