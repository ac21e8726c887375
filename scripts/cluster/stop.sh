#!/usr/bin/env bash
# Asks the runs on this host to stop, and waits until they and all roles on this host have ended (Kubernetes: preStop).
# A host without a driver waits for the driver of another host, whose step under way needs its generators.
set -euo pipefail
pkill -TERM -f 'python[^ ]* -P -m slipstream\.train' || true
while pgrep -f 'python[^ ]* -P -m slipstream\.train|^ray::(Generator|Learner)Role' >/dev/null; do sleep 0.5; done
