#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=runs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=SIGUSR1@300
# The same command under Slurm, one task per GPU; SIGUSR1 comes 300 s before the time is up:
#   mkdir -p runs && sbatch --nodes=4 launch/slurm.sh fit --config configs/pretrain.yaml
# Submit from the project's folder. PYTHON names the interpreter (default: .venv/bin/python).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch: sbatch launch/slurm.sh fit --config <file>}"

if [ $# -eq 0 ]; then
    echo "usage: sbatch launch/slurm.sh fit|validate|test|predict --config <file> [...]" >&2
    exit 2
fi

packages=(*/__main__.py)
package=${packages[0]%/__main__.py}

# A requeued job keeps its number, so it goes on in the folder it began.
export DIST_RUN_ID=${DIST_RUN_ID:-slurm-$SLURM_JOB_ID}

# Flags stand after the --config files, which would override them.
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m "$package" "$@" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" --trainer.num_nodes="$SLURM_JOB_NUM_NODES"
