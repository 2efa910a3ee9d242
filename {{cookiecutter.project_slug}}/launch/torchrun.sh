#!/usr/bin/env bash
# Starts a command under torchrun, which restarts the processes when one dies:
#   launch/torchrun.sh fit --config configs/pretrain.yaml --config strategy/ddp
# On several nodes, start it on each of them with the same NNODES (or MIN:MAX: training continues when a node is lost),
# RDZV_ENDPOINT (host:port of the first node) and DIST_RUN_ID (the run's folder). NPROC: processes per node (its GPUs);
# MAX_RESTARTS (3); SHUTDOWN_TIMEOUT: seconds to save after a signal (30); LOCAL_ADDR: this node's address; RDZV_CONF:
# is_host=true on the first node if hosts cannot resolve their names; PYTHON; DIST_PACKAGE. Exit code 75: start it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || { echo "usage: launch/torchrun.sh fit|validate|test|predict --config <file> [...]" >&2; exit 2; }
packages=(*/__main__.py); package=${DIST_PACKAGE:-${packages[*]%/__main__.py}}
[[ $package != *" "* ]] || { echo "launch/torchrun.sh: set DIST_PACKAGE to one of: $package" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true) nnodes=${NNODES:-1}
if [ "$nnodes" != 1 ] && [ -z "${RDZV_ENDPOINT:-}" -o -z "${DIST_RUN_ID:-}" ]; then
    echo "launch/torchrun.sh: with NNODES=$nnodes set RDZV_ENDPOINT=<first node>:<port> and DIST_RUN_ID=<one name>, the same on every node" >&2
    exit 2
fi
# All ranks, and every restart, agree on the run's folder. torch 2.13 shares one store among restart rounds without a
# prefix, and restarted ranks read dead addresses. A lost connection is one sentence; WARNING adds the C++ frames.
export DIST_RUN_ID=${DIST_RUN_ID:-$(date +%Y%m%d-%H%M%S)}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# A lost node is detected after keep_alive_interval x keep_alive_max_attempt seconds; after last_call_timeout more the
# others continue without it (MIN:MAX). Measured: 19 s in total; 49 s with torchrun's own 5, 3 and 30.
conf=keep_alive_interval=2,keep_alive_max_attempt=2,last_call_timeout=3${RDZV_CONF:+,$RDZV_CONF}
exec "${PYTHON:-.venv/bin/python}" -m dist_template.cluster.torchrun \
    --nnodes="$nnodes" --nproc-per-node="${NPROC:-$((gpus > 0 ? gpus : 1))}" --max-restarts="${MAX_RESTARTS:-3}" \
    --monitor-interval=0.1 --signals-to-handle=SIGTERM,SIGUSR1,SIGINT --shutdown-timeout="${SHUTDOWN_TIMEOUT:-30}" \
    --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT:-localhost:0}" --rdzv-id="$DIST_RUN_ID" --rdzv-conf="$conf" \
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} -m "$package" "$@"
