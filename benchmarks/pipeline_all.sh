#!/bin/sh
# Every row that compares whole steps and jobs with stock Diffusers on one 141 GB GPU, most important first:
#     sh benchmarks/pipeline_all.sh RESULTS_FOLDER
# Each command has a time limit, 10 minutes in all, and leaves a JSON file of what it measured until then.
# PYTHON names another interpreter than python3. Compiled code is kept between the commands.
set -u
out=${1:?usage: pipeline_all.sh RESULTS_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONUNBUFFERED=1

limited() {
    seconds=$1 name=$2
    shift 2
    echo "== $name: $*"
    timeout -k 10 "$seconds" "$python" -m benchmarks.pipeline "$@" --json "$out/pipeline_$name.json" || echo "$name: exit code $?"
}

limited 120 step_1.3b wan2.1-t2v-1.3b --step-only --rounds 3 --repeats 5 \
    --variants stock dense+compile sparse+compile sparse+compile+chunks sparse+compile+fp8+fp8attention \
    sparse+compile+chunks+fp8+fp8attention
limited 120 step_14b wan2.1-t2v-14b --step-only --layers 8 --rounds 2 --repeats 2 \
    --variants stock dense+compile sparse+compile sparse+compile+chunks sparse+compile+fp8+fp8attention \
    sparse+compile+fp8+fp8attention+chunks
# Weights of jobs that are offloaded are pinned on the host, 17 GiB for each such variant.
limited 230 job_1.3b wan2.1-t2v-1.3b --job --steps 20 --dense-steps 0 --rounds 1 \
    --variants stock sparse+compile+chunks+vae16+encoder dense+compile+chunks+vae16+encoder
limited 80 step_article article-7b --step-only --rounds 2 --repeats 3 \
    --variants stock dense+compile sparse+compile sparse+compile+chunks
limited 60 scores_article article-7b --step-only --rounds 1 --repeats 2 --in-turn \
    --variants stock stock+scores sparse+compile+chunks
