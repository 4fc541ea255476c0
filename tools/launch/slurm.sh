#!/usr/bin/env bash
# A run on GPU nodes of Slurm, a process a GPU: sbatch THIS, in the repository, on a disk that all nodes see.
# {{ grace }} seconds before its time is up, or when it is preempted, the run saves and exits with 130; the job is put
# back into the queue, and goes on.
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ gpus }}
#SBATCH --gpus-per-node={{ gpus }}
#SBATCH --time={{ time }}
#SBATCH --signal=TERM@{{ grace }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ name }}.log

srun --kill-on-bad-exit=1 .venv/bin/python -m north_jax.main --distributed{{ arguments | shell }}
status=$?
if [ "$status" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
