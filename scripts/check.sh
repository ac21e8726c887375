#!/usr/bin/env bash
# What this machine has, and what works on it: run it first on a new machine, and put what it prints into a bug report.
#   scripts/check.sh                    everything that this machine allows, a minute or two
#   scripts/check.sh engine weights     only the checks whose names begin so
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.check "$@"
