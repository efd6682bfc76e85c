# Prefect server, MLflow server and CPU worker: one image, three commands (see compose.yaml).
#   docker build -f docker/cpu.Dockerfile --build-arg TORCH_INDEX_URL=<PyTorch's index of CPU builds> -t nightjar-cpu .
# Without that argument PyTorch's default build is taken, which works as well and is gigabytes larger.

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
RUN groupadd --gid 10001 nightjar \
    && useradd --uid 10001 --gid nightjar --home-dir /var/lib/nightjar --create-home nightjar \
    && install -d -o nightjar -g nightjar /var/lib/mlflow
COPY --from=build /opt/nightjar /opt/nightjar
ENV PATH=/opt/nightjar/bin:$PATH \
    NIGHTJAR_HOME=/var/lib/nightjar \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_WORKER_WEBSERVER_PORT=8080
USER 10001:10001
WORKDIR /var/lib/nightjar
VOLUME ["/var/lib/nightjar", "/var/lib/mlflow"]
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=8)"]
CMD ["prefect", "worker", "start", "--pool", "cpu", "--type", "process", "--with-healthcheck"]
