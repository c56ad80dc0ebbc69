# Build and bench on NVIDIA's image; CUDA's libraries, PyTorch and TensorRT come as packages, in the tested versions:
#   docker build -t ghostexport .
#   docker run --rm --gpus all -v "$PWD:/data" ghostexport build engine /data/model -o /data/run --prune 6 --runtime tensorrt
FROM nvcr.io/nvidia/cuda:13.0.1-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y python3-venv && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/ghostexport
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY ghostexport ghostexport
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -c constraints.txt '.[tensorrt,gpu,report,serve]'
WORKDIR /data
ENTRYPOINT ["ghostexport"]
CMD ["--help"]
