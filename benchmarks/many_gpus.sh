#!/usr/bin/env bash
# All that waits for several GPUs, in one call: shortest first, each with its deadline, records as they come, one table last.
#
#   benchmarks/many_gpus.sh GPUS OUT [IMDB.jsonl.gz TOKENIZER_FOLDER]
#
# Without the last two, what needs the reviews is left out, and said. SECONDS_LEFT (default 1500) is the time for all of
# it: a row that would begin later is left out, and said. The same command again goes on where it stopped. REHEARSE=1
# goes through the rows on a CPU with gloo and tiny models, in minutes: that nothing falls over for a missing name.
# ROWS="memory_predicted memory" runs these rows alone.
# DEEPSPEED is a folder (pip install --target) where deepspeed lies, for the row that runs it: beside accelerate,
# transformers would load it in every test.
set -uo pipefail
gpus=$1 out=$(mkdir -p "$2" && cd "$2" && pwd)
data=${3:-} tokenizer=${4:-}
cd "$(dirname "$0")/.."
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
rehearse=${REHEARSE:-}
ends=$(($(date +%s) + ${SECONDS_LEFT:-1500}))
: > "$out/rows.md"

# row NAME SECONDS TABLE COMMAND...: the command with its deadline; TABLE is the file that it writes, or -
row() {
    local name=$1 limit=$2 table=$3
    shift 3
    [[ " ${ROWS:-$name} " == *" $name "* ]] || return 0
    local left=$((ends - $(date +%s))) began rc said
    ((left < limit)) && limit=$left
    if ((limit < 20)); then
        echo "| $name | left out: no time |" >> "$out/rows.md"
        return
    fi
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
    rc=$?
    case $rc in 0) said=done ;; 124 | 137) said="cut after $limit s" ;; *) said="failed ($rc), see $name.log" ;; esac
    [ "$table" != - ] && [ -f "$table" ] && tables+=("$name" "$table")
    echo "| $name | $said, $(($(date +%s) - began)) s: $(tail -n 1 "$out/$name.log" | tr '|' ' ' | cut -c 1-160) |" | tee -a "$out/rows.md"
}

tests() { echo "$python" -m pytest -p no:cacheprovider -q --tb=short; }

tables=()
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "$out/machine.txt" 2> /dev/null || uname -a > "$out/machine.txt"

row strategies_tests 240 - $(tests) tests/gpu/test_two_gpus.py tests/gpu/test_ddp.py tests/gpu/test_fsdp.py tests/gpu/test_dp.py \
    tests/gpu/test_sync_batch_norm.py tests/gpu/test_ema.py tests/gpu/test_lora.py tests/gpu/test_stop.py
if [ -n "$rehearse" ]; then
    row splits 240 "$out/splits.md" "$python" benchmarks/splits.py --processes "$gpus" --size tiny --rounds 1 --out "$out/splits.jsonl"
else
    name=$(head -n 1 "$out/machine.txt" | grep -oiE 'h100|h200|a100' | head -n 1 | tr 'A-Z' 'a-z')
    case $name in h100 | a100) name=$name-80gb ;; esac
    row splits_predicted 200 - "$python" benchmarks/splits.py --gpus "$gpus" --predict "$name" --out "$out/splits.jsonl"
    row splits 480 "$out/splits.md" env "PYTHONPATH=$PYTHONPATH${DEEPSPEED:+:$DEEPSPEED}" DS_BUILD_OPS=0 "$python" benchmarks/splits.py --gpus "$gpus" --limit 90 --deadline 470 --out "$out/splits.jsonl"
    row copies 90 - "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$gpus" \
        benchmarks/sums_by_copies.py --out "$out/copies.jsonl"
    row memory_predicted 200 - "$python" benchmarks/memory_accuracy.py predict --gpu "$name" --out "$out/predicted.jsonl" --only '*dp_*'
    row memory 300 - "$python" benchmarks/memory_accuracy.py measure --predicted "$out/predicted.jsonl" --out "$out/memory.jsonl" --deadline 290
fi
if [ -n "$data" ] && [ -z "$rehearse" ]; then
    for suite in tutorial_ddp ddp_weak ddp_peers; do
        row $suite 420 "$out/$suite.md" "$python" benchmarks/speed.py $suite --rounds 1 --deadline 410 --out "$out" \
            --data "$data" --tokenizer "$tokenizer"
    done
else
    echo "| tutorial_ddp, ddp_weak, ddp_peers | left out: no reviews given |" >> "$out/rows.md"
fi
for ((at = 0; at < ${#tables[@]}; at += 2)); do
    printf '\n## %s\n\n' "${tables[at]}"
    cat "${tables[at + 1]}"
done
printf '\n| row | how it ended |\n|---|---|\n'
cat "$out/rows.md"
