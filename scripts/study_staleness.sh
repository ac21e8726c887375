#!/usr/bin/env bash
# What staleness costs each algorithm on the tiny task: a table, a plot, docs/staleness.md. scripts/study_staleness.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/study_staleness.py" "$@"
