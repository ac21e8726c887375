#!/usr/bin/env bash
# Makes this host a node of a Ray cluster, for launchers that start one program on each host. All of it ends with the head.
#   scripts/cluster/node.sh head --nodes=2 --peer=OTHER_HOST scripts/launch.sh cluster.address=auto ...
#   scripts/cluster/node.sh join HEAD_HOST:6379
# RAY_AUTH_TOKEN must be the same on every host (`openssl rand -hex 20`). --help explains the options.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "$0")/../env.sh"
prepare
exec python -P -m slipstream.ray_node "$@"
