#!/usr/bin/env bash
# GRPO by verl with rlrefit's checkpoint engines; arguments override keys of grpo_qwen3_4b.yaml, --config-name names another.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python "$here/missing.py" --config-name grpo_qwen3_4b "$@"
exec python -m verl.trainer.main_ppo --config-dir "$here" --config-name grpo_qwen3_4b "$@"
