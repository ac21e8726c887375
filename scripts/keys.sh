#!/usr/bin/env bash
# Makes CURVE keys for the buffer. Then set buffer.keys=FOLDER.
#   scripts/keys.sh FOLDER [ROLE:CLIENT ...]
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.keys "$@"
