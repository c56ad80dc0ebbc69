#!/bin/sh
# Checks ghostexport on a machine with an NVIDIA GPU, in under ten minutes, without a package index.
#
# On a machine with an index and the same Python version and platform, in this checkout:
#   pip wheel -w wheels '.[gpu,tensorrt-rtx]'     (or tensorrt; torch and onnxruntime-gpu are gigabytes with CUDA)
# then on the GPU machine, in a copy of this checkout with the folder beside it:
#   tools/gpu_check.sh wheels
#
#   tools/gpu_check.sh WHEELS|- [RUN] [OPTIONS OF gpu_check.py]
#
# WHEELS: that folder; what is made from it lies in $TMPDIR and is removed at the end. "-": check the environment that runs now.
# RUN: a run folder whose graphs are checked; by default a tiny model.
# PYTHON: the interpreter, python3 unless set. The wheels must be made for its version.
# Writes gpu_check.json here. Exit code: 0 passed, 1 a check failed, 2 nothing can run here, 124 out of time.
set -eu
limit=590
begun=$(date +%s)
wheels=${1:?usage: tools/gpu_check.sh WHEELS|- [RUN]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

fail() {
  echo "gpu_check.sh: $1" >&2
  exit 2
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export TMPDIR="$scratch"
if [ "$wheels" != "-" ]; then
  has() { ls "$wheels/$1"-*.whl >/dev/null 2>&1; }
  has ghostexport || fail "no wheel of ghostexport in $wheels: make the folder with pip wheel -w $wheels '.[gpu,tensorrt-rtx]'"
  packages=ghostexport
  if has onnxruntime_gpu; then packages="$packages onnxruntime-gpu"; else packages="$packages onnxruntime"; fi
  for name in tensorrt tensorrt_rtx; do
    if has "$name"; then packages="$packages $name"; else echo "no wheel of $name"; fi
  done
  "$python" -m venv "$scratch/environment" || fail "$python cannot make a virtual environment"
  python=$scratch/environment/bin/python
  "$python" -m pip install --quiet --no-index --find-links "$wheels" $packages ||
    fail "the wheels do not fit $("$python" -VV), $(uname -m): make them with this version, on this platform"
fi
command -v nvidia-smi >/dev/null && nvidia-smi || echo "nvidia-smi is not here"
left=$((limit - $(date +%s) + begun))
[ "$left" -gt 60 ] || fail "installing took all the time: install the wheels by hand and run tools/gpu_check.sh -"
code=0
timeout --foreground "$left" "$python" "$root/tools/gpu_check.py" --seconds $((left - 50)) "$@" || code=$?
exit $code
