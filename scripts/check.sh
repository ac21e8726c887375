#!/usr/bin/env bash
# Says what this machine has and what works on it. Run it first on a new machine, and put its output into a bug report.
#   scripts/check.sh                    everything that this machine allows, a minute or two
#   scripts/check.sh engine weights     only the checks whose names begin so
#   scripts/check.sh cluster.address=auto [NAME ...]    all nodes of a Ray cluster at once, and the links between them
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
program=check
[[ " $*" != *" cluster."*=* ]] || program=check_nodes
exec python -P -m "slipstream.$program" "$@"
