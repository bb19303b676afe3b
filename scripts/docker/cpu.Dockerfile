# Hub, rollout nodes with the embedded engine and trainers, on CPUs.
#   docker build -f scripts/docker/cpu.Dockerfile -t astraflow:cpu .
#   docker run --rm -v "$PWD/runs:/home/astraflow/runs" astraflow:cpu run recipes/sort.yaml
FROM python:3.11-slim-bookworm AS build
# What a distribution's release has is what is wanted of a compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# An index of CPU wheels of torch, where the default one has CUDA builds only.
ARG TORCH_INDEX=""
COPY constraints-cpu.txt /opt/
COPY --from=build /wheels /opt/wheels
RUN for wheel in /opt/wheels/*.whl; do \
      python -m pip install --no-cache-dir --constraint /opt/constraints-cpu.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "${wheel}[demo,http,store,parquet,postgres,otel]"; \
    done \
    && rm -r /opt/wheels \
    && useradd --create-home --uid 1000 astraflow
USER 1000
WORKDIR /home/astraflow
COPY --chown=astraflow recipes recipes
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["astraflow"]
CMD ["doctor"]
