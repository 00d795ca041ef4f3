#!/usr/bin/env bash
# GRPO of the tiny model by verl on two GPUs, once for each checkpoint engine; overrides go into VERL_OVERRIDES.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RLREFIT_VERL_EXAMPLES=$here RLREFIT_VERL_DATA=${RLREFIT_VERL_DATA:-$PWD/runs/verl_arithmetic}
python3 "$here/arithmetic.py" "$RLREFIT_VERL_DATA"
exec python3 "$here/compare.py" "$RLREFIT_VERL_DATA" ${@:-nccl nccl_xfer nccl_xfer_shards} -- ${VERL_OVERRIDES:-}
