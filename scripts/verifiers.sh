#!/usr/bin/env bash
# Runs a Python program in an environment of verifiers, apart from the project's: the two pin other packages.
#   scripts/verifiers.sh                  makes the environment: once, about 600 MB
#   scripts/verifiers.sh PROGRAM [ARG...] runs a program in it, for example as the agent_command of a task
# SLIPSTREAM_VERIFIERS names another folder. Verifiers installs what its harnesses need into HOME, so it gets one there.
set -euo pipefail
folder=${SLIPSTREAM_VERIFIERS:-${SLIPSTREAM_CACHE:-$HOME/.cache/slipstream}/verifiers}
stamp=$folder/verifiers-0.4.0.ready
if [ ! -e "$stamp" ]; then
  [ $# -eq 0 ] || { echo "There is no environment of verifiers in $folder: make it with scripts/verifiers.sh" >&2; exit 3; }
  . "$(dirname "$0")/env.sh"
  prepare
  mkdir -p "$folder/home"
  exec 8>"$folder/lock"
  flock 8
  if [ ! -e "$stamp" ]; then
    hand_pip_settings_to_uv
    python -m uv venv --quiet --seed --clear "$folder/venv"
    python -m uv pip install --quiet --python "$folder/venv/bin/python" "verifiers==0.4.0" "transformers>=5" uv
    touch "$stamp"
  fi
  exec 8>&-
fi
[ $# -gt 0 ] || { echo "The environment of verifiers is in $folder/venv"; exit 0; }
export HOME=$folder/home PATH=$folder/venv/bin:$PATH
exec "$folder/venv/bin/python" "$@"
