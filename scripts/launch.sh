#!/usr/bin/env bash
# Trains: prepares the environment (once), makes the tiny model (once), starts buffer, generators and learner.
#   scripts/launch.sh                                      the tiny model learns to sort, on CPU or GPU
#   scripts/launch.sh +experiment=smoke                    the same, short
#   scripts/launch.sh +experiment=guess_number             it learns a game of several turns
#   scripts/launch.sh mode=on_policy                       the synchronous baseline
#   scripts/launch.sh staleness.max_versions=4 generators.count=3
#   scripts/launch.sh run.resume=outputs/NAME              goes on from the newest checkpoint
#   scripts/launch.sh role=generators buffer.address=tcp://127.0.0.1:PORT    more generators join a run
#   scripts/launch.sh --help [KEY|SECTION]                 every key in a line, or all about one
#   scripts/launch.sh --plan model.path=FOLDER --gpus 8 --gpu-memory 80      the memory of a run, on paper
set -euo pipefail
. "$(dirname "$0")/env.sh"
case " $* " in
  *" --plan "*) run_program plan "$@" ;;
  *) run_program train "$@" ;;
esac
