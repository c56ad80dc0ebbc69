#!/bin/sh
# Checks ghostexport on a machine with an NVIDIA GPU, without a package index.
#
#   tools/gpu_check.sh WHEELS [RUN]
#
# WHEELS: folder with the wheels of ghostexport's dependencies and of the runtimes to check, made on another machine with
#   pip download -d WHEELS '.[gpu,dev]' tensorrt      (or tensorrt-rtx; a torch build with CUDA)
#   Use "-" to check the current environment instead.
# RUN: optional run folder whose graphs are checked; by default a tiny model.
# Writes gpu_check.json here. Exit code: 0 passed, 1 a check failed, 2 nothing can run here.
set -eu
wheels=${1:?usage: tools/gpu_check.sh WHEELS|- [RUN]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
if [ "$wheels" != "-" ]; then
  test -x .gpu_check/bin/python || python3 -m venv .gpu_check
  python=.gpu_check/bin/python
  "$python" -m pip install --quiet --no-index --find-links "$wheels" setuptools wheel
  "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-build-isolation "$root"
  for extra in onnxruntime-gpu onnxruntime tensorrt tensorrt-rtx; do
    case $extra in onnxruntime) "$python" -c 'import onnxruntime' 2>/dev/null && continue ;; esac
    "$python" -m pip install --quiet --no-index --find-links "$wheels" "$extra" 2>/dev/null || echo "no wheel of $extra"
  done
fi
nvidia-smi 2>/dev/null || echo "nvidia-smi is not here"
exec timeout 590 "$python" "$root/tools/gpu_check.py" "$@" --output gpu_check.json
