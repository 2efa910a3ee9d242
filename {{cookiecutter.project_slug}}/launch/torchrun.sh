#!/usr/bin/env bash
# Starts a command under torchrun, which restarts the processes when one dies:
#   launch/torchrun.sh fit --config configs/pretrain.yaml --config strategy/ddp
# On several nodes, start it on each of them with the same NNODES, RDZV_ENDPOINT and DIST_RUN_ID.
#   NPROC             processes per node            (default: its GPUs, 1 without any)
#   NNODES            nodes, or MIN:MAX             (default: 1; with MIN:MAX training continues when a node is lost)
#   RDZV_ENDPOINT     host:port of the first node   (default: a free port of this machine)
#   RDZV_CONF         further rendezvous settings   (key=value,key=value; if a host cannot resolve its own name:
#                                                   is_host=true on the first node, is_host=false on the others)
#   LOCAL_ADDR        this node's address           (default: from its host name)
#   DIST_RUN_ID       name of this run's folder     (default on one node: the time)
#   MAX_RESTARTS      restarts before giving up     (default: 3; 0 turns them off)
#   SHUTDOWN_TIMEOUT  seconds for the processes to save after a signal, then they are killed (default: 30)
#   PYTHON            interpreter (default: .venv/bin/python); DIST_PACKAGE: which of several packages to start
# It exits with 75 if the same command resumes the run: preempted, or a restart here does not help. docs: exit codes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -eq 0 ]; then
    echo "usage: launch/torchrun.sh fit|validate|test|predict --config <file> [...]" >&2
    exit 2
fi

python=${PYTHON:-.venv/bin/python}
packages=(*/__main__.py); package=${DIST_PACKAGE:-${packages[*]%/__main__.py}}
[[ $package != *" "* ]] || { echo "launch/torchrun.sh: set DIST_PACKAGE to one of: $package" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
nnodes=${NNODES:-1}
if [ "$nnodes" != 1 ] && [ -z "${RDZV_ENDPOINT:-}" -o -z "${DIST_RUN_ID:-}" ]; then
    echo "launch/torchrun.sh: with NNODES=$nnodes set RDZV_ENDPOINT=<first node>:<port> and DIST_RUN_ID=<one name>, the same on every node" >&2
    exit 2
fi

# All ranks, and every restart, agree on the run's folder.
export DIST_RUN_ID=${DIST_RUN_ID:-$(date +%Y%m%d-%H%M%S)}
# torch 2.13 shares one store among restart rounds without a prefix, and restarted ranks read dead addresses
# (half of the restarts hung); this and the c10d rendezvous avoid it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A lost connection is reported in one sentence; WARNING adds the C++ frames.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# A lost node is detected after keep_alive_interval x keep_alive_max_attempt seconds; after last_call_timeout more the
# others continue without it (MIN:MAX). Measured: 19 s in total; 49 s with torchrun's own 5, 3 and 30.
conf=keep_alive_interval=2,keep_alive_max_attempt=2,last_call_timeout=3${RDZV_CONF:+,$RDZV_CONF}

# The environment tells the processes their number, at each restart again.
exec "$python" -m dist_template.cluster.torchrun \
    --nnodes="$nnodes" --nproc-per-node="${NPROC:-$((gpus > 0 ? gpus : 1))}" \
    --max-restarts="${MAX_RESTARTS:-3}" --monitor-interval=0.1 \
    --signals-to-handle=SIGTERM,SIGUSR1,SIGINT --shutdown-timeout="${SHUTDOWN_TIMEOUT:-30}" \
    --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT:-localhost:0}" --rdzv-id="$DIST_RUN_ID" --rdzv-conf="$conf" \
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} -m "$package" "$@"
