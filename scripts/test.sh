#!/usr/bin/env bash
# Everything that must hold: style, types, tests. Arguments go to pytest (then only pytest runs).
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare test
cd "$root"
if [ $# -eq 0 ]; then
  ruff check .
  ruff format --check .
  mypy
fi
exec python -m pytest "$@"
