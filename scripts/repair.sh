#!/usr/bin/env bash
# Saves what can be saved of a damaged journal, and lists the rest.
#   scripts/repair.sh RUN        scripts/repair.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.repair "$@"
