#!/usr/bin/env bash
# Kills and disturbs at random, and audits what is left.
#   scripts/chaos.sh [--kills 200] [--seed 0]            the data path: buffer, producers, consumer
#   scripts/chaos.sh --run [--faults 300] [--seed 0] [--minutes M]   whole runs over three hosts of this machine (needs root)
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
program=chaos
if [ "${1:-}" = --run ]; then program=chaos_run && shift; fi
exec python "$root/scripts/bench/$program.py" "$@"
