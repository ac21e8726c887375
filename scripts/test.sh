#!/usr/bin/env bash
# Everything that must hold: style, types, tests. Arguments go to pytest (then only pytest runs).
#
# Without arguments, tests run in five rows side by side, for most wait as much as they compute: whole runs (two rows), servers and
# links, ranks and models, and the rest; the type checker beside them. What they have to say is printed at the end; any failure fails
# the whole.
set -euo pipefail
. "$(dirname "$0")/env.sh"
prepare test
cd "$root"
[ $# -eq 0 ] || exec python -m pytest "$@"

said=$(mktemp -d) names=() pids=() failed=()
trap 'for job in $(jobs -pr); do kill -INT -- -$job; done; wait; rm -rf "$said"' EXIT
beside() { # NAME COMMAND...: starts it, in a process group of its own, which takes Ctrl-C as usual
  set -m
  "${@:2}" >"$said/${#names[@]}" 2>&1 &
  pids+=($!) names+=("$1")
  set +m
}

servers=(tests/test_{bad_weights,chaos,closed,fuzz,heartbeat,scoring,sync,transports}.py)
ranks=(tests/test_{checkpoint,export,families,fsdp,learner,lora,megatron,mixtures,models,parity,same_numbers,shards,step,stream,vllm_engine,world}.py)
ruff check .
ruff format --check .
beside "types" mypy
beside "whole runs" python -m pytest -m whole_run tests/test_run.py
beside "other whole runs" python -m pytest -m whole_run --ignore tests/test_run.py
beside "servers and links" python -m pytest -m "not whole_run" "${servers[@]}"
beside "ranks and models" python -m pytest -m "not whole_run" "${ranks[@]}"
rest=("${servers[@]}" "${ranks[@]}")
python -m pytest -m "not whole_run" "${rest[@]/#/--ignore=}" || failed+=("tests")
for i in "${!names[@]}"; do
  wait "${pids[i]}" || failed+=("${names[i]}")
  echo "${names[i]}:"
  cat "$said/$i"
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
echo "All is well ($SECONDS s)."
