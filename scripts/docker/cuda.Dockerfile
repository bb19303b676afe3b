# Trainers on GPUs, and rollout nodes whose engine is a server with an environment of its own.
#   docker build -f scripts/docker/cuda.Dockerfile --target vllm -t astraflow:vllm .
#   docker build -f scripts/docker/cuda.Dockerfile --target sglang -t astraflow:sglang .
#   docker run --rm --gpus all --ipc=host astraflow:vllm doctor
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS base
# What a distribution's release has is what is wanted of these.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
      gcc g++ git libc6-dev libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m venv /opt/astraflow \
    && /opt/astraflow/bin/python -m pip install --no-cache-dir ".[all]" \
    && rm -rf build ./*.egg-info
ENV PATH=/opt/astraflow/bin:$PATH PYTHONUNBUFFERED=1
# The image has a user of the number 1000 already.
USER 1000
WORKDIR /home/ubuntu
COPY --chown=ubuntu recipes recipes
ENTRYPOINT ["astraflow"]
CMD ["doctor"]

FROM base AS sglang
ARG SGLANG_VERSION=0.5.23
USER 0
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/python -m pip install --no-cache-dir "sglang[all]==${SGLANG_VERSION}"
ENV ASTRAFLOW_SGLANG_PYTHON=/opt/sglang/bin/python
USER 1000

FROM base AS vllm
ARG VLLM_VERSION=0.32.0
USER 0
RUN python3 -m venv /opt/vllm \
    && /opt/vllm/bin/python -m pip install --no-cache-dir "vllm==${VLLM_VERSION}"
ENV ASTRAFLOW_VLLM_PYTHON=/opt/vllm/bin/python
USER 1000
