#!/usr/bin/env bash
# Changes the number of generators of a run while it goes on.
#   scripts/scale.sh RUN NUMBER        scripts/scale.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.scale "$@"
