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
# Starts a command under Slurm, one task per GPU. SIGUSR1 arrives 300 s before the time limit: the tasks save and exit
# with 75, and the job is requeued, as when a task is killed or hangs. It is not requeued for bad input.
#   mkdir -p runs && sbatch --nodes=4 launch/slurm.sh fit --config configs/pretrain.yaml
# Submit from the project's folder.
#   PYTHON        interpreter (default: .venv/bin/python); DIST_PACKAGE: which of several packages to start
#   CONTAINER     words before it, as in CONTAINER="apptainer exec --nv image.sif"; SRUN_FLAGS: more flags of srun
#   MAX_REQUEUES  how often a crashed job is requeued; a preempted one always is (default: 10)
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch: sbatch launch/slurm.sh fit --config <file>}"

if [ $# -eq 0 ]; then
    echo "usage: sbatch launch/slurm.sh fit|validate|test|predict --config <file> [...]" >&2
    exit 2
fi

packages=(*/__main__.py); package=${DIST_PACKAGE:-${packages[*]%/__main__.py}}
[[ $package != *" "* ]] || { echo "launch/slurm.sh: set DIST_PACKAGE to one of: $package" >&2; exit 2; }

# A requeued job keeps its number, and so its folder; its time limit starts again.
export DIST_RUN_ID=${DIST_RUN_ID:-slurm-$SLURM_JOB_ID}
export DIST_JOB_STARTED=$(date +%s)

# When one task has exited, the others have 60 s to exit with the same code; --kill-on-bad-exit would kill them while
# they save. srun returns the highest code. The flags come after the --config files, which would override them.
code=0
srun --kill-on-bad-exit=0 --wait=60 ${SRUN_FLAGS:-} ${CONTAINER:-} "${PYTHON:-.venv/bin/python}" -m "$package" "$@" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" --trainer.num_nodes="$SLURM_JOB_NUM_NODES" || code=$?

case $code in
75) requeue=yes ;;                 # saved: preempted, or out of time
71 | 13[1-9] | 14[0-9])            # a rank hung, or was killed by a signal (128 + its number)
    [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-10}" ] && requeue=yes || requeue=no ;;
*) requeue=no ;;                   # done, bad input, non-finite, other machines, a bug, Ctrl-C
esac
echo "launch/slurm.sh: the tasks ended with code $code; requeue: $requeue"
if [ "$requeue" = yes ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
