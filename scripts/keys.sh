#!/usr/bin/env bash
# Makes CURVE keys for the buffer: scripts/keys.sh FOLDER [ROLE:CLIENT ...]      (then set buffer.keys=FOLDER)
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.keys "$@"
