#!/bin/bash
#SBATCH --job-name=it-s-one
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir='/home/ada/my project'
#SBATCH --output='/data/my runs/it'"'"'s one.slurm/%j.log'

# Written by paceline launch slurm. Every start of the job, the first and those after a requeue, runs all of it.
run='/data/my runs/it'"'"'s one'
logs='/data/my runs/it'"'"'s one.slurm'
paceline=(python -m paceline)

say() { echo "[$(date +%FT%T) ${SLURMD_NODENAME:-$(hostname)}] $*"; }

# the run is finished when it has a summary: srun may exit with 0 after a node was lost
if [ -e "$run/summary.json" ]; then
    say "the run is finished: $run"
    exit 0
fi

shopt -s nullglob
saved=("$run"/checkpoints/step-*/COMMITTED)
shopt -u nullglob
step=0
if [ ${#saved[@]} -gt 0 ]; then
    step=${saved[-1]%/COMMITTED}
    step=$((10#${step##*/step-}))
fi

# a start that comes no further than the one before it will not do so the next time either
starts=$logs/$SLURM_JOB_ID.starts
same=0
if [ -e "$starts" ]; then
    while read -r at; do
        if [ "$at" = "$step" ]; then same=$((same + 1)); else same=0; fi
    done < "$starts"
fi
if [ "$same" -ge 5 ]; then
    say "given up: $same starts in a row came no further than step $step"
    exit 1
fi
echo "$step" >> "$starts"

start="start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID"
if [ ${#saved[@]} -gt 0 ]; then
    say "$start: goes on after step $step on $SLURM_JOB_NODELIST"
    command=("${paceline[@]}" train "$run" --resume --trust-references --processes=4)
else
    if [ -e "$run" ]; then
        aside=$run.without-checkpoint-$(date +%Y%m%d-%H%M%S)
        mv "$run" "$aside"
        say "no checkpoint is in $run: moved to $aside"
    fi
    say "$start: begins on $SLURM_JOB_NODELIST"
    command=("${paceline[@]}" train --model 'a model' --data 'it'"'"'s.csv' --out "$run" --processes=4)
fi
# a run that is stopped says by what: in its folder, and also here, where it may not have one yet
word=$logs/$SLURM_JOB_ID.stopped
rm -f "$run/preempted" "$word"

# a signal is answered when srun has ended; one that were ignored instead, srun and the ranks would ignore too
trap : TERM
# srun does not take --cpus-per-task from sbatch; a rank that fails ends the others itself, and says why
PACELINE_STOPPED_FILE="$word" srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 "${command[@]}"
code=$?

if [ -e "$run/summary.json" ]; then
    say "the run is finished: $run"
    exit 0
fi
# only after the warning: what scancel sends is to end the job, and after a preemption Slurm itself queues it again;
# a start that does not listen yet is ended by the signal itself
if grep -qsw "stopped by SIGUSR1" "$run/preempted" "$word" || [ "$code" -eq $((128 + $(kill -l USR1))) ]; then
    say "$(cat "$run/preempted" 2>/dev/null || echo "stopped by SIGUSR1 before anything was saved")"
    say "queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
say "ended with exit code $code before the run was finished"
exit $((code ? code : 1))
