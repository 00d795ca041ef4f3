#!/usr/bin/env bash
# GRPO by NeMo-RL (its checkout in $NEMO_RL) with weights shard to shard; arguments override keys of grpo_qwen3_4b.yaml.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${NEMO_RL:?set it to the folder of a checkout of NVIDIA-NeMo/RL}"
[[ -f $NEMO_RL/examples/run_grpo.py ]] || { echo "NEMO_RL=$NEMO_RL is no checkout of NVIDIA-NeMo/RL: it has no examples/run_grpo.py" >&2; exit 2; }
command -v uv >/dev/null || { echo "uv, which runs NeMo-RL, is not on PATH" >&2; exit 2; }
export NEMO_RL
export VLLM_USE_V2_MODEL_RUNNER=0 # refits into Model Runner V2 have not run under NeMo-RL
exec uv run --directory "$NEMO_RL" python "$here/train.py" --config "$here/grpo_qwen3_4b.yaml" "$@"
