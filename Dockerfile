# Build and bench on NVIDIA's image, which brings CUDA, PyTorch and TensorRT:
#   docker build -t ghostexport .
#   docker run --rm --gpus all -v "$PWD:/data" ghostexport build engine /data/model -o /data/run --prune 6 --runtime tensorrt
FROM nvcr.io/nvidia/pytorch:25.06-py3
WORKDIR /opt/ghostexport
COPY pyproject.toml README.md LICENSE ./
COPY ghostexport ghostexport
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# the image's own torch, TensorRT and numpy stay
RUN (pip freeze | grep -iE '^(torch|tensorrt|numpy)==' > /tmp/kept.txt || true) \
    && pip install --no-cache-dir -c /tmp/kept.txt '.[report]'
WORKDIR /data
ENTRYPOINT ["ghostexport"]
CMD ["--help"]
