#!/usr/bin/env bash
# Kills buffer, producers and consumer at random, and audits the journal that is left.
#   scripts/chaos.sh [--kills 200] [--seed 0]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python "$root/scripts/bench/chaos.py" "$@"
