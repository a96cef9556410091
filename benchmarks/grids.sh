#!/usr/bin/env bash
# The grids of the field reports on a machine with 4 GPUs, with telemetry and a report of each.
#
#     benchmarks/grids.sh cnn10|wide_resnet|conv2d|oom RESULTS
#
# An interrupted grid is finished by the same command. NFOLD_DATA names the data's folder.
set -euo pipefail
grid=$1
results=$2
nfold=(python3 -m nfold)

case $grid in
cnn10)
    "${nfold[@]}" bench cnn10 --devices 1,2,4 --batch 128,512,2048 --strategy ddp,dp \
        --layout channels_first,channels_last --epochs 3 --results "$results"
    ;;
wide_resnet)
    "${nfold[@]}" bench wide_resnet:depth=28,width=10 --devices 1,2 --batch 128,256,512 \
        --precision tf32 --epochs 2 --results "$results"
    ;;
conv2d)
    "${nfold[@]}" bench conv2d --devices 1,2,4 --strategy ddp,dp --parameter filter=3,5,10 \
        --parameter channels=1,10 --results "$results"
    "${nfold[@]}" bench conv2d --devices 1,2,4 --parameter copy_only=1 --results "$results"
    ;;
oom)
    # A network four times as wide at four times the batch does not fit on one card.
    "${nfold[@]}" bench wide_resnet:depth=28,width=40 --devices 1,2 --batch 4096 \
        --steps 5 --warmup-steps 1 --results "$results"
    ;;
*)
    echo "unknown grid '$grid': allowed are cnn10, wide_resnet, conv2d, oom" >&2
    exit 2
    ;;
esac
