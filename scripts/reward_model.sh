#!/usr/bin/env bash
# Serves a reward model, a Hugging Face sequence classifier, for the reward part `reward_model` (docs/environments.md).
#   scripts/reward_model.sh --model FOLDER --port 8100
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare
exec python -P -m slipstream.reward_model "$@"
