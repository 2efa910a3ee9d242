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
# One task per GPU:  mkdir -p runs && sbatch --nodes=4 launch/slurm.sh fit --config configs/pretrain.yaml
# SIGUSR1 arrives 300 s before the time limit: the tasks save, exit with 75, and the job is requeued, as after a crash.
# PYTHON, DIST_PACKAGE, SRUN_FLAGS; CONTAINER: words before PYTHON (apptainer exec --nv image.sif); MAX_REQUEUES: how often
# a crashed job is requeued (10), a preempted one always is. It keeps its number, and so its folder.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch: sbatch launch/slurm.sh fit --config <file>}"
[ $# -gt 0 ] || { echo "usage: sbatch launch/slurm.sh fit|validate|test|predict --config <file> [...]" >&2; exit 2; }
packages=(*/__main__.py); package=${DIST_PACKAGE:-${packages[*]%/__main__.py}}
[[ $package != *" "* ]] || { echo "launch/slurm.sh: set DIST_PACKAGE to one of: $package" >&2; exit 2; }
export DIST_RUN_ID=${DIST_RUN_ID:-slurm-$SLURM_JOB_ID} DIST_JOB_STARTED=$(date +%s)
# srun has not inherited sbatch's --cpus-per-task since Slurm 22.05: without it a task would have one CPU.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
# When one task has exited, the others have 60 s to exit with the same code; --kill-on-bad-exit would kill them while
# they save. srun returns the highest code. The flags come after the --config files, which would override them.
code=0
srun --kill-on-bad-exit=0 --wait=60 ${SRUN_FLAGS:-} ${CONTAINER:-} "${PYTHON:-.venv/bin/python}" -m "$package" "$@" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" --trainer.num_nodes="$SLURM_JOB_NUM_NODES" || code=$?
requeue=no  # done, bad input, non-finite, other machines, a bug, Ctrl-C
case $code in
75) requeue=yes ;;  # saved: preempted, or out of time
71 | 13[1-9] | 14[0-9]) [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-10}" ] || requeue=yes ;;  # hung, or a signal
esac
echo "launch/slurm.sh: the tasks ended with code $code; requeue: $requeue"
[ "$requeue" = no ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
