#!/bin/bash
#SBATCH --job-name=digits --array=0-7 --nodes=1 --ntasks=1
#SBATCH --requeue --signal=B:USR1@60 --open-mode=append
run=$PWD/elasticflow-runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID    # on a file system that all nodes share
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

trap 'kill -USR1 $node 2>/dev/null' USR1 TERM    # leave at the next step
elasticflow run --nnodes=1:8 --rdzv-endpoint="file://$run" --run-dir="$run" --checkpoint="file://$run" \
    examples/01-lightning-digits/train.py "$@" &
node=$!
while kill -0 $node 2>/dev/null; do wait $node; done
wait $node
status=$?

restarts=${SLURM_RESTART_COUNT:-0}
[ $status = 69 ] || [ $status -gt 128 ] || { [ $status = 2 ] && [ "$restarts" -gt 0 ]; }    # 2: it finds no job, say
is_lost=$?
if [ $status = 75 ] || { [ $is_lost = 0 ] && [ "$restarts" -lt 20 ]; }; then
    # It was told to go, or is lost: it comes back when there is room, unless Slurm has ended it for good.
    for pause in 1 2 4 8 0; do    # slurmctld may have too much to do, or be started again
        state=$(squeue --noheader --job="$task" --format=%T) &&
            { [ "$state" != RUNNING ] || scontrol requeue "$task"; } && break
        sleep $pause
    done
elif [ $status -le 1 ]; then
    # The training is over, or has failed: those that still wait in the queue are not needed, except the first one.
    scancel --quiet --state=PENDING "${SLURM_ARRAY_JOB_ID}_[1-7]"
fi
exit $status
