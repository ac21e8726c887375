#!/usr/bin/env bash
# Writes a checkpoint of a run as a Hugging Face folder, for transformers, vLLM, or another run's model.path.
#   scripts/export.sh RUN FOLDER
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.export "$@"
