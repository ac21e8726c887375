#!/usr/bin/env bash
# Everything that must hold: style, types, tests. Arguments go to pytest (then only pytest runs).
#
# Without arguments, tests of whole runs run beside the others and beside the type checker: they wait as much as they compute.
# What they and the type checker have to say is printed at the end; any failure fails the whole.
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare test
cd "$root"
[ $# -eq 0 ] || exec python -m pytest "$@"

said=$(mktemp -d)
trap 'for job in $(jobs -pr); do kill -INT -- -$job; done; wait; rm -rf "$said"' EXIT
ruff check .
ruff format --check .
set -m # jobs in process groups of their own, which take Ctrl-C as usual
mypy >"$said/types" 2>&1 &
types=$!
python -m pytest -m whole_run >"$said/whole_runs" 2>&1 &
whole_runs=$!
set +m
failed=()
python -m pytest -m "not whole_run" || failed+=("tests")
wait $types || failed+=("types")
cat "$said/types"
echo "Tests of whole runs:"
wait $whole_runs || failed+=("tests of whole runs")
cat "$said/whole_runs"
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
echo "All is well ($SECONDS s)."
