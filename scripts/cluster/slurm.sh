#!/usr/bin/env bash
# One run over the hosts of a Slurm job. The hosts see the project's folder, which has the environment and outputs/.
#   scripts/cluster/slurm.sh --nodes=4 --gpus-per-node=8 --time=24:00:00 key=value ...    submits a job
#   scripts/cluster/slurm.sh --dry-run --nodes=4 key=value ...                            prints what it would do
#   sbatch --nodes=4 scripts/cluster/slurm.sh key=value ...                               in the project's folder: the same
# Options (-...) go to sbatch, keys to scripts/launch.sh (write --comment=A=B: A=B alone is a key). Three minutes before the time limit the run writes a checkpoint, and
# the job is queued again; so it is when it is preempted or loses its first host. It goes on where it was, under the same name.
#SBATCH --job-name=slipstream
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slipstream-%j.log
#SBATCH --signal=B:USR1@180
set -euo pipefail

dry_run=false options=() overrides=() name='' outputs=outputs
key='^(\+{0,2}[[:alpha:]_][[:alnum:]_.@/:-]*=|~)'
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry_run=true
  elif [[ $argument =~ $key ]]; then overrides+=("$argument")
  else options+=("$argument"); fi # also the value of the option before it
  case $argument in
    run.name=*) name=${argument#*=} ;;
    run.outputs=*) outputs=${argument#*=} ;;
  esac
done

# Slurm runs a copy of this file, which is not in the project.
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -e "$root/scripts/cluster/node.sh" ] || root=${SLURM_SUBMIT_DIR:-$PWD}
[ -e "$root/scripts/cluster/node.sh" ] || { echo "sbatch must run in the project's folder, got $root" >&2; exit 2; }

# Prints a command so that it can be pasted.
show() { printf '%q ' "$@"; echo; }

submit=(sbatch --chdir="$root" ${options[@]+"${options[@]}"} "$root/scripts/cluster/slurm.sh" ${overrides[@]+"${overrides[@]}"})
if [ -z "${SLURM_JOB_ID:-}" ] && ! $dry_run; then exec "${submit[@]}"; fi

# What follows runs on the first host of the job; a dry run shows it with the names that are not known yet.
job=${SLURM_JOB_ID:-JOB}
hosts=(HOST_0 HOST_1)
[ -z "${SLURM_JOB_NODELIST:-}" ] || mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=${SLURM_JOB_NUM_NODES:-NODES}
port=6379 # jobs may share a host
[ "$job" = JOB ] || port=$((20000 + job % 10000))
[ -n "$name" ] || { name=slurm-$job && overrides+=("run.name=$name"); }
run=(scripts/launch.sh cluster.address=auto run.resume=auto "${overrides[@]}")
lead=(scripts/cluster/node.sh head --nodes="$count" --port="$port" ${hosts[1]:+--peer="${hosts[1]}"} "${run[@]}")
join=(scripts/cluster/node.sh join "${hosts[0]}:$port")
# A host that is lost, or ends early, does not end the others.
step=(srun --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0)

if $dry_run; then
  echo "# submit the job"
  show "${submit[@]}"
  echo "# on $count hosts, the first of them is ${hosts[0]}"
  show "${step[@]}" ...
  echo "# on the first"
  show "${lead[@]}"
  echo "# on the others"
  show "${join[@]}"
  echo "# three minutes before the time limit: a checkpoint, then"
  show scontrol requeue "$job"
  command -v sbatch >/dev/null || exit 0
  echo "# what Slurm says of it"
  "${submit[0]}" --test-only "${submit[@]:1}"
  exit
fi

find_newest() { { find "$outputs/$name/checkpoints" -maxdepth 1 -name "step_*" 2>/dev/null || true; } | sort -V | tail -n 1; }
cd "$root"
# Nobody else on the hosts may start processes in the cluster of this job.
RAY_AUTH_TOKEN=$(od -An -N20 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
before=$(find_newest) limited=false
"${step[@]}" bash -c "if [ \$SLURM_PROCID = 0 ]; then exec $(show "${lead[@]}"); else exec $(show "${join[@]}"); fi" &
srun=$!
# `srun` itself would kill the hosts' processes at a signal.
# shellcheck disable=SC2329
stop_run() { scancel --signal=TERM "$job" 2>/dev/null || true; }
trap 'limited=true; stop_run' USR1
trap stop_run TERM
while true; do
  status=0
  wait "$srun" || status=$?
  kill -0 "$srun" 2>/dev/null || break # `wait` returns at a signal, too
done
if $limited && [ "$status" != 0 ]; then
  if [ "$(find_newest)" = "$before" ]; then
    echo "The time limit must be long enough for a checkpoint, got one without: $outputs/$name is not queued again." >&2
  else
    scontrol requeue "$job"
  fi
fi
exit "$status"
