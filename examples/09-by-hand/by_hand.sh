#!/usr/bin/env bash
# Kill and join by hand: what README.md does in two shells, here in one, step by step.
set -euo pipefail
run=${1:-build/by-hand}
digits=examples/01-lightning-digits/train.py
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
view() { elasticflow status --once "$run" 2>/dev/null | sed -n 's/^ *workers *\([0-9][0-9]*\)[, ].*view \([0-9]*\) *$/\1 \2/p'; }
generation=0
# A view of so many workers that is newer than the last one that was waited for: those in between may be short.
until_there_are() {
    for _ in $(seq 300); do
        read -r number newest <<<"$(view)" || true
        if [ "$number" = "$1" ] && [ "$newest" -gt "$generation" ]; then generation=$newest && return; fi
        sleep 0.3
    done
    exit 1
}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
say "Two workers"
elasticflow run --nproc-per-node=2 --run-dir="$run" --checkpoint="$run/checkpoints" \
    "$digits" --epochs=1000 --step-seconds=0.1 >"$run.log" 2>&1 &
launcher=$!
trap 'kill "$launcher" 2>/dev/null || true; wait' EXIT
until_there_are 2
elasticflow status --once "$run"

say "SIGKILL to one of them: the other goes on, and it is started again"
kill -KILL "$(grep -ho '"kind":"start","pid":[0-9]*' "$run"/events/*.jsonl | head -1 | cut -d: -f3)"
until_there_are 2
elasticflow status --once "$run"

say "One more"
elasticflow scale "$run" 3
until_there_are 3

say "Two less: they leave at the next step, and nothing is lost"
elasticflow scale "$run" 1
until_there_are 1
elasticflow status --once "$run"

say "Ctrl-C: the last one leaves, with a checkpoint"
kill -INT "$launcher"
wait "$launcher" || [ $? = 130 ]
ls "$run/checkpoints/checkpoints"

say "The same command goes on from there"
elasticflow run --nproc-per-node=2 --run-dir="$run" --checkpoint="$run/checkpoints" \
    "$digits" --epochs=1000 --step-seconds=0.1 >>"$run.log" 2>&1 &
launcher=$! generation=0
until_there_are 2
elasticflow status --once "$run" | grep -A1 "run 2"
kill -INT "$launcher"
wait "$launcher" || [ $? = 130 ]

say "Was every sample trained on exactly once, is every step there?"
elasticflow audit "$run"
