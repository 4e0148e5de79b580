"""The script for `sbatch`."""

from __future__ import annotations

import shlex

from tfdist.errors import EXIT_USAGE
from tfdist.jobs.job_environment import JOB, RESTART, SECRET, START_SECONDS
from tfdist.jobs.slurm import PARAMETER_SERVERS
from tfdist.launcher.job import SECRET_BYTES, Job, refuse_hosts


def slurm(job: Job) -> str:
    """Returns a script for `sbatch` that runs the job.

    Raises:
        UsageError: the job names hosts, although Slurm chooses them.
    """
    refuse_hosts(job, "slurm", "Slurm chooses the nodes, and `sbatch --nodelist=...` names them")
    size = len(job.roles)
    command = shlex.join(("python", *job.command))
    step = f"srun --kill-on-bad-exit=1 --label --distribution=block {command}"
    variables = [
        f'export {JOB}="slurm-$SLURM_JOB_ID"',
        f"export {START_SECONDS}={job.start_seconds:g}",
        "# By this secret, which `srun` passes on, the processes recognize each other.",
        f"{SECRET}=$(od -An -N{SECRET_BYTES} -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {SECRET}",
    ]
    if job.ps:
        variables += [
            "# The number of parameter servers, which are the last processes; the first is the chief, the rest train.",
            f"export {PARAMETER_SERVERS}={job.ps}",
        ]
    return "\n".join(
        [
            _SLURM_HEAD.format(
                size=size,
                processes=f"{size} processes" if size > 1 else "one process",
                requeue=_REQUEUE if job.restarts else _NO_REQUEUE,
            ),
            *variables,
            _SLURM_RESTARTS.format(restarts=job.restarts, variable=RESTART, step=step, usage=EXIT_USAGE)
            if job.restarts
            else step,
            "",
        ]
    )


_SLURM_HEAD = """\
#!/usr/bin/env bash
# Runs one program in {processes}, as a Slurm job: `sbatch FILE`. Check the lines below `edit`.

#SBATCH --job-name=tfdist
#SBATCH --output=%x-%j.out
#SBATCH --ntasks={size}
# edit: one process per node. With fewer nodes, processes share nodes; `--ntasks-per-node` limits how many.
#SBATCH --nodes={size}
# edit: resources per process. Remove one `#`, and set what your nodes have.
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-task=1
# edit: partition and time limit.
##SBATCH --partition=NAME
##SBATCH --time=04:00:00
{requeue}

# edit: make `python` the one with tfdist, for example by `source /shared/venv/bin/activate`. This comes before
# `set -u`, with which some activation scripts fail.

set -euo pipefail

# Since Slurm 22.05, a step does not inherit this setting from its job.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
"""

_NO_REQUEUE = """\
# A failure ends the job, also if a node fails.
#SBATCH --no-requeue"""

_REQUEUE = """\
# A job that is put back into the queue, by Slurm or by the end of this script, runs this script again.
#SBATCH --requeue
#SBATCH --open-mode=append"""

# `scancel` and the time limit end this script together with its processes, before it can requeue the job.
_SLURM_RESTARTS = """\

# The number of restarts of this job by Slurm; above 0, tfdist.train continues from its last checkpoint.
export {variable}=${{SLURM_RESTART_COUNT:-0}}
restarts={restarts}
if [ "${variable}" -gt "$restarts" ]; then
  echo "error: Slurm has restarted this job ${variable} times; at most $restarts restarts are allowed" >&2
  exit 1
fi

# If a process fails, all processes are ended and started again.
status=0
{step} || status=$?
# Exit code {usage}, which `srun` returns if no process has a higher code, is a usage error: a restart does not help.
if [ "$status" -ne 0 ] && [ "$status" -ne {usage} ] && [ "${variable}" -lt "$restarts" ]; then
  echo "The job failed with exit code $status; putting it back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status\""""
