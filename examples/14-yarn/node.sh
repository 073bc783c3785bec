#!/bin/bash
# One node. YARN starts it again whenever it ends, until the service is stopped.
cd /mnt/shared/elasticflow || exit 2    # the repository, on a file system that all nodes share
run=$PWD/elasticflow-runs/digits-yarn
mkdir -p "$run"
export PATH=$PWD/.venv/bin:$PATH    # where ElasticFlow is installed
export ELASTICFLOW_TOKEN=$(cat ~/.elasticflow-token)    # one secret for all nodes

trap 'kill -USR1 $node 2>/dev/null' TERM    # leave at the next step
elasticflow run --nnodes=1:8 --rdzv-endpoint="file://$run" --run-dir="$run" --checkpoint="file://$run" \
    examples/01-lightning-digits/train.py --epochs=1000 --step-seconds=0.1 &
node=$!
while kill -0 $node 2>/dev/null; do wait $node; done
wait $node
status=$?
if [ $status -le 1 ]; then yarn app -stop digits; fi    # the training is over, or has failed
exit $status
