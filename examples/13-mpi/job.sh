#!/bin/bash
#SBATCH --job-name=digits-mpi
#PBS -N digits-mpi
run=$PWD/elasticflow-runs/digits-mpi-${SLURM_JOB_ID:-${PBS_JOBID:-$$}}    # on a file system that all nodes share

exec elasticflow mpi --map-by ppr:1:node \
    elasticflow run --run-dir="$run" --checkpoint="file://$run" examples/01-lightning-digits/train.py "$@"
