#!/usr/bin/env bash
# Checks style and types, and runs all tests. With arguments it runs pytest alone, with these arguments.
#
# Without arguments, tests run in rows side by side (tests/rows.py), and the type checker beside them.
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare test
cd "$root"
[ $# -eq 0 ] || exec python -m pytest "$@"

ruff check .
ruff format --check .
said=$(mktemp) failed=()
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -f "$said"' EXIT
mypy >"$said" 2>&1 &
types=$!
python tests/rows.py || failed+=("tests")
wait "$types" || failed+=("types")
cat "$said"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
echo "All is well ($SECONDS s)."
