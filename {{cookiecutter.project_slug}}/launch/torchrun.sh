#!/usr/bin/env bash
# The same command under torchrun, which restarts the processes when one dies:
#   launch/torchrun.sh fit --config configs/pretrain.yaml --config configs/strategy/ddp.yaml
# On several nodes, start it on each of them with the same NNODES, RDZV_ENDPOINT and DIST_RUN_ID.
#   NPROC          processes per node            (default: its GPUs, 1 without any)
#   NNODES         nodes                         (default: 1)
#   RDZV_ENDPOINT  host:port of the first node   (default: a free port of this machine)
#   DIST_RUN_ID    name of this run's folder     (default on one node: the time)
#   MAX_RESTARTS   restarts before giving up     (default: 3; 0 turns them off)
#   PYTHON         interpreter                   (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# -eq 0 ]; then
    echo "usage: launch/torchrun.sh fit|validate|test|predict --config <file> [...]" >&2
    exit 2
fi

python=${PYTHON:-.venv/bin/python}
packages=(*/__main__.py)
package=${packages[0]%/__main__.py}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
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

# Flags stand after the --config files, which would override them.
exec "$python" -m torch.distributed.run \
    --nnodes="$nnodes" --nproc-per-node="$nproc" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT:-localhost:0}" --rdzv-id="$DIST_RUN_ID" \
    -m "$package" "$@" --trainer.devices="$nproc" --trainer.num_nodes="$nnodes"
