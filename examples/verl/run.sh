#!/usr/bin/env bash
# GRPO by verl with weights over nccl_xfer; arguments override keys of grpo_qwen3_4b.yaml.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec python -m verl.trainer.main_ppo --config-dir "$here" --config-name grpo_qwen3_4b "$@"
