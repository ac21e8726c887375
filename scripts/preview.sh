#!/usr/bin/env bash
# Shows what a run would train on, before it trains: prompts as the model sees them, sampled replies, their rewards.
#   scripts/preview.sh [--rows 5] [--samples 1] [--split train] [--no-engine] [--json] [key=value ...]
set -euo pipefail
. "$(dirname "$0")/env.sh"
run_program preview "$@"
