#!/usr/bin/env bash
# Trains again from a run's journal, without generators.
#   scripts/replay.sh RUN [--from-step K] [--to-step K] [key=value ...]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.replay "$@"
