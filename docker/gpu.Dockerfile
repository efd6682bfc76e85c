# GPU worker. PyTorch's default build brings its CUDA libraries; the host brings the driver and NVIDIA's container
# toolkit.
#   docker build -f docker/gpu.Dockerfile -t nightjar-gpu .

FROM python:3.11.13-slim-bookworm AS build
ARG TORCH_INDEX_URL=""
ENV TORCH_INDEX_URL=${TORCH_INDEX_URL}
WORKDIR /source
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY docker/install.sh docker/servers.lock docker/
COPY configs configs
COPY training training
COPY tasks tasks
COPY flows flows
RUN sh docker/install.sh /opt/nightjar /source

FROM python:3.11.13-slim-bookworm
# A C compiler: PyTorch compiles small kernels when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 nightjar \
    && useradd --uid 10001 --gid nightjar --home-dir /var/lib/nightjar --create-home nightjar
COPY --from=build /opt/nightjar /opt/nightjar
ENV PATH=/opt/nightjar/bin:$PATH \
    NIGHTJAR_HOME=/var/lib/nightjar \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_WORKER_WEBSERVER_PORT=8080
USER 10001:10001
WORKDIR /var/lib/nightjar
VOLUME ["/var/lib/nightjar"]
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=8)"]
CMD ["prefect", "worker", "start", "--pool", "gpu", "--type", "process", "--with-healthcheck"]
