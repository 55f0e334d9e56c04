#!/bin/sh
# Train and capture, show, forecast, open TensorBoard: the commands of a first session, one after the other.
set -eu
cd "$(dirname "$0")/.."
RUN=runs/llama

say() { printf '\n\033[1m[%s] %s\033[0m\n' "$1" "$2"; }
run() { printf '\033[2m$ %s\033[0m\n' "$*"; "$@"; }

forecast() {
    run llmprof forecast "$RUN" --cluster "$1" --gpus 16 --global-batch 64 --tb "$RUN" \
        --layout dp=16,mb=4 --layout dp=16,zero=3,mb=4 --layout dp=4,tp=2,pp=2,mb=4,accum=4
}

say 1/5 "train 20 steps on this machine; the decorator captures them"
run python examples/train_llama.py --steps 20

say 2/5 "where does the step go?"
run llmprof show "$RUN"

say 3/5 "what would it be on 16 GPUs, with three layouts, on two clusters?"
forecast 8xH100-SXM
forecast 8xA100-80GB

say 4/5 "which layout of all there are?"
run llmprof search "$RUN" --cluster 8xH100-SXM --gpus 8,16 --global-batch 64 --where "cp==1" --top 4

say 5/5 "the same in TensorBoard"
printf 'The log is written. Open it with\n\n    %s --logdir %s\n\nand choose the tab LLMPROF.\n' \
    "${LLMPROF_BIN:+$LLMPROF_BIN/}tensorboard" "$RUN"
