#!/usr/bin/env bash
# Proves on a device what no other check can, in less than eight minutes and without a network:
#   ci/device_check.sh [cuda|rocm|xpu|npu] [--folder device_check] [--step NAME] [--device cpu]
# Run again, it goes on where it was; Ctrl-C ends it at once. Needs the environment of that platform (pip install -e
# ".[cuda,platform-test]" and the like) as PYTHON, or as the `python`, else `python3`, that is found; transformers there
# too for the engine's peer.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
python=${PYTHON:-$(command -v python || command -v python3 || echo python)}
exec "$python" "$root/benchmarks/device/check.py" "$@"
