#!/usr/bin/env bash
# Draws the timeline of a run, also while it goes on: timeline.json (open it in ui.perfetto.dev) and timeline.png.
#   scripts/timeline.sh outputs/NAME [--steps 10]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.timeline "$@"
