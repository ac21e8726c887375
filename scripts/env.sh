# Prepares the environment once, then gets out of the way. The other scripts source it, and call `prepare EXTRA...`
# or `run_program NAME ARGUMENT...`.
#
# With uv (installed into the environment) a cold start takes about a minute and a warm one a second. SLIPSTREAM_VENV names
# another place for the environment; PYTHON another interpreter (3.11 or 3.12); SLIPSTREAM_EXTRAS extras to install in any case;
# SLIPSTREAM_BACKEND `cuda` or `cpu`, where this host does not show what the environment is for (images).
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SLIPSTREAM_VENV:-$root/.venv}

backend=${SLIPSTREAM_BACKEND:-}
if [ -n "$backend" ]; then :; elif nvidia-smi -L >/dev/null 2>&1; then backend=cuda; else backend=cpu; fi

# Prints the path of the file that marks an environment with these extras of this project.
stamp_of() {
  echo "$venv/.slipstream-$(printf '%s %s' "$1" "$root" | cat - "$root/pyproject.toml" | cksum | tr ' ' -)"
}

prepare() {
  local extras stamp
  extras=$(printf '%s\n' "$backend" "$@" | sort -u | paste -sd,)
  stamp=$(stamp_of "$extras")
  if [ ! -e "$stamp" ]; then
    # Two first starts at once would tear each other's packages. The lock is released before anything else starts.
    mkdir -p "$venv"
    exec 9>"$venv/.slipstream-lock"
    flock 9
    [ -e "$stamp" ] || make_environment "$extras" || { echo "The environment could not be prepared." >&2; exec 9>&-; return 1; }
    exec 9>&-
  fi
  PATH="$venv/bin:$PATH"
  # Without cached bytecode an engine takes 25 s to start instead of 10.
  unset PYTHONDONTWRITEBYTECODE
}

# Runs a program that knows which extras its configuration needs (scripts/slipstream/extras.py). Where some are missing it
# starts this script again, with their names in SLIPSTREAM_EXTRAS.
run_program() {
  prepare ${SLIPSTREAM_EXTRAS:-}
  SLIPSTREAM_SCRIPT=$root/scripts/$(basename "$0") exec python -P -m "slipstream.$1" "${@:2}"
}

# uv does not read pip's configuration: with it, mirrors and local wheels work.
hand_pip_settings_to_uv() {
  local links index
  links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
  index=${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
  if [ -n "$links" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-${links//[[:space:]]/,}}"; fi
  if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
}

make_environment() {
  local extras=$1 began=$SECONDS installed=$venv/.slipstream-extras
  # When the project has changed, the extras that are there change with it.
  [ ! -e "$installed" ] || extras=$(tr , '\n' <<<"$extras" | sort -u - "$installed" | paste -sd,)
  echo "Preparing the environment in $venv with [$extras]: once, 1 to 5 minutes ..." >&2
  local python
  for python in "${PYTHON:-}" python3.11 python3.12 python3; do
    [ -n "$python" ] && "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && break
    python=
  done
  [ -n "$python" ] || { echo "Slipstream needs Python 3.11 or 3.12 on the PATH (or in PYTHON)." >&2; return 1; }
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return 1
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv || return 1
  hand_pip_settings_to_uv
  # PyTorch's CPU wheels come from pip's find-links where it has them, else from PyTorch's own index.
  local extra=()
  if [ "$backend" = cpu ] && ! ls ${UV_FIND_LINKS:-/nonexistent}/torch-*+cpu-*.whl >/dev/null 2>&1; then
    extra=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
  fi
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${extra[@]}" --editable "$root[$extras]" >&2 || return 1
  tr , '\n' <<<"$extras" | grep -vx "$backend" >"$installed" || true # another machine may need another backend
  touch "$(stamp_of "$1")" "$(stamp_of "$extras")" "$(stamp_of "$backend")" # what has more is enough for those who need less
  echo "The environment is ready ($((SECONDS - began)) s)." >&2
}
