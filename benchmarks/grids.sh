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
    for layout in channels_last channels_first; do
        "${nfold[@]}" bench cnn10 --devices 1,2,4 --batch 128,512,2048 --strategy ddp,dp \
            --layout $layout --precision tf32 --input loader --step eager --epochs 3 \
            --results "$results"
    done
    ;;
wide_resnet)
    "${nfold[@]}" bench wide_resnet:depth=28,width=10 --devices 1,2 --batch 128,256,512 \
        --precision tf32 --strategy ddp --input loader --step eager --steps 40 \
        --results "$results"
    ;;
conv2d)
    "${nfold[@]}" bench conv2d --devices 1,2,4 --strategy ddp,dp --results "$results"
    "${nfold[@]}" bench conv2d --devices 1,4 --parameter filter=5,10 --results "$results"
    "${nfold[@]}" bench conv2d --devices 1,4 --parameter channels=10 --parameter filter=3,10 \
        --results "$results"
    "${nfold[@]}" bench conv2d --devices 1,4 --parameter size=400 --batch 84 --results "$results"
    "${nfold[@]}" bench conv2d --devices 1,4 --parameter copy_only=1 --results "$results"
    ;;
oom)
    # Activations of 32,768 images do not fit on one card; on two they still do not.
    "${nfold[@]}" bench wide_resnet:depth=28,width=10 --devices 1,2 --batch 32768 \
        --strategy ddp --input loader --step eager --steps 5 --warmup-steps 1 \
        --results "$results"
    ;;
*)
    echo "unknown grid '$grid': allowed are cnn10, wide_resnet, conv2d, oom" >&2
    exit 2
    ;;
esac
