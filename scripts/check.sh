#!/usr/bin/env bash
# Says what this machine has and what works on it. Run it first on a new machine, and put its output into a bug report.
#   scripts/check.sh                    everything that this machine allows, a minute or two
#   scripts/check.sh engine weights     only the checks whose names begin so
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.check "$@"
