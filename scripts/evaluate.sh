#!/usr/bin/env bash
# Evaluates a run's checkpoint, an export or any Hugging Face folder; the same command goes on where it was stopped.
#   scripts/evaluate.sh outputs/NAME [--step K]                    a checkpoint, on the run's own sets
#   scripts/evaluate.sh models/mine eval.benchmarks=[gsm8k]        a benchmark of the catalogue
#   scripts/evaluate.sh models/mine eval.sets.gsm8k.data=test.parquet
#   scripts/evaluate.sh outputs/A outputs/B                        both, and the difference
set -euo pipefail
. "$(dirname "$0")/env.sh"
run_program evaluate "$@"
