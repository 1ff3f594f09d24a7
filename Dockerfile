# The image of the gate: Python, the six packages it needs, and nothing else of the project.
# It runs as a non-root user on a read-only root filesystem, and needs no shell.
#
#   docker build -t sluicegate-gate .
#   docker run --read-only --user 65532 -v ./policy.yaml:/etc/sluicegate/policy.yaml:ro sluicegate-gate \
#     --policy /etc/sluicegate/policy.yaml --upstream http://ENGINE:8080 --listen 0.0.0.0:8000 --admin 0.0.0.0:9901

ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/sluicegate
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sidecar sidecar
COPY lab lab
RUN /opt/sluicegate/bin/pip install --no-cache-dir --constraint constraints.txt ".[sidecar]" \
 && /opt/sluicegate/bin/python -m compileall -q /opt/sluicegate/lib

FROM ${BASE}
COPY --from=build /opt/sluicegate /opt/sluicegate
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 MALLOC_ARENA_MAX=1
USER 65532:65532
EXPOSE 8000 9901
ENTRYPOINT ["/opt/sluicegate/bin/python", "-m", "sluicegate_sidecar"]
