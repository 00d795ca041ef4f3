#!/usr/bin/env bash
# Trains by rlrefit and then by TRL's own transfer, and prints the seconds of each update:
#
#     python examples/trl/grpo.py --write-tiny runs/tiny && examples/trl/compare.sh runs/tiny --steps 8
#     TRAIN=0,1 SERVE=2,3 examples/trl/compare.sh CHECKPOINT --lr 1e-6    # FSDP2 over two GPUs, the server at TP2
#     WAYS=rlrefit TRAIN=0 SERVE=0 MEMORY=0.3 examples/trl/compare.sh CHECKPOINT
#
# SERVE_ARGS are more arguments of vllm serve, such as --enforce-eager.
# TRL's own needs a GPU that is not the server's: NCCL takes no two ranks on one. Arguments behind the model go to grpo.py,
# such as --step-first, which leaves the optimizer's step out of the seconds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=${1:?usage: compare.sh FOLDER [arguments of grpo.py], with the folder of a checkpoint}
shift
python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { echo "trainer and server need GPUs, and torch finds none here; python examples/trl/grpo.py --cpu trains without" >&2; exit 2; }
train=${TRAIN:-0} serve=${SERVE:-1} port=${PORT:-8000}
ranks=$(awk -F, '{print NF}' <<<"$train")
launch=(python)
if ((ranks > 1)); then
  launch=(python -m accelerate.commands.launch --config_file "$here/fsdp2.yaml" --num_processes "$ranks")
fi
mkdir -p runs/trl
for way in ${WAYS:-rlrefit own}; do
  backend=rlrefit own=()
  if [[ $way == own ]]; then backend=nccl own=(--own); fi
  VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 CUDA_VISIBLE_DEVICES=$serve \
    python -m vllm.entrypoints.cli.main serve "$model" --port "$port" --dtype bfloat16 \
    --max-model-len 512 --logprobs-mode processed_logprobs --tensor-parallel-size "$(awk -F, '{print NF}' <<<"$serve")" \
    --gpu-memory-utilization "${MEMORY:-0.8}" --weight-transfer-config "{\"backend\": \"$backend\"}" ${SERVE_ARGS:-} >"runs/trl/$way.server.log" 2>&1 &
  server=$!
  trap 'kill $server 2>/dev/null || true' EXIT
  echo "$way: the server writes to runs/trl/$way.server.log, the trainer's errors are in runs/trl/$way.trainer.log"
  CUDA_VISIBLE_DEVICES=$train "${launch[@]}" "$here/grpo.py" --model "$model" --server "http://127.0.0.1:$port" \
    --out "runs/trl/$way" "${own[@]}" "$@" 2>"runs/trl/$way.trainer.log" | sed "s/^/$way: /"
  kill $server
  wait $server || true
done
