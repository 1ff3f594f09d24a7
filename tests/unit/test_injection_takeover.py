"""How the port is taken over: each way to say a port, each reason to leave a pod alone, held against a simulation."""

from __future__ import annotations

from typing import Any

import pytest
from tests.manifests.building import container, engine_of, gate_of, gated, pod, refusal, script
from tests.manifests.simulation import GATE, simulate

from sluicegate_operator.injection.choice import RefusedError, read_engine
from sluicegate_operator.injection.images import find_image
from sluicegate_operator.injection.takeover import check_moved

LLAMA = "ghcr.io/ggml-org/llama.cpp:server-cuda"
TGI = "ghcr.io/huggingface/text-generation-inference:3.0"


def env(**values: Any) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def from_field(name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


TAKEN: list[tuple[str, dict[str, Any], int]] = [
    ("joined flag", container(), 8000),
    ("flag in two words", container(args=["--model", "m", "--port", "9000"]), 9000),
    ("flag in the command", container(command=["vllm", "serve", "m", "--port", "9000"], args=["--dtype=half"]), 9000),
    ("no flag", container(args=["--model=m"], ports=None), 8000),
    ("the last of two", container(args=["--port=1234", "--model=m", "--port", "9000"]), 9000),
    ("variable of the pod", container(args=["--port=$(HTTP_PORT)"], env=env(HTTP_PORT="9000")), 9000),
    ("variable of a variable", container(args=["--port", "$(B)"], env=env(A="9000", B="$(A)")), 9000),
    ("host of all", container(args=["--host", "::", "--port=8000"]), 8000),
    ("host of the pod", container(args=["--host=$(IP)", "--port=8000"], env=[from_field("IP")]), 8000),
    ("decoys", container(env=env(VLLM_PORT="5555", PORT="1", VLLM_HOST_IP="10.0.0.1")), 8000),
    ("a wrapper", container(command=["/usr/bin/env", "A=b", "vllm", "serve", "m", "--port", "9000"], args=None), 9000),
    ("tini", container(command=["/tini", "-s", "--", "vllm", "serve", "m"], args=["--port=9000"]), 9000),
    ("CPUs", script("nice -n 5 timeout 99 taskset -c 0 vllm serve m --port 9000"), 9000),
    ("path", container(command=["/opt/venv/bin/vllm", "serve", "m", "--port=9000"], args=None), 9000),
    ("module by path", container(command=["python3", "-u", "-m", "vllm.entrypoints.openai.api_server"]), 8000),
    ("mirror", container(image="registry.example:5000/mirror/vllm/vllm-openai@sha256:" + "0" * 64), 8000),
    ("an entrypoint that starts its args", container(image="example/x:1", args=["vllm", "serve", "m"]), 8000),
    ("exec", script("exec vllm serve m --port 9000"), 9000),
    ("in the background", script("vllm serve m --port=9000 & wait"), 9000),
    ("with a pipe", script("vllm serve m --port 9000 2>&1 | tee /dev/null"), 9000),
    ("set --", script('set -- serve m --port 9000\nexec vllm "$@"'), 9000),
    ("set -- with the program", script('set -- vllm serve m\nset -- "$@" --port 9000\nexec "$@"'), 9000),
    ("an array", script('ARGS=(m --port 9000)\nARGS+=(--dtype half)\nvllm serve "${ARGS[@]}"'), 9000),
    ("a string of flags", script('FLAGS="--port 9000 --dtype half"\nvllm serve m $FLAGS'), 9000),
    ("a default", script('vllm serve m --port "${PORT:-9000}"', ports=[{"containerPort": 9000}]), 9000),
    ("a default that is overruled", script("vllm serve m --port ${PORT:-1}", env=env(PORT="9000")), 9000),
    ("eval of text", script('eval "exec vllm serve m --port 9000"'), 9000),
    ("eval of a variable", script('CMD="vllm serve m --port 9000"\neval "$CMD"'), 9000),
    ("eval with a hole", script('eval "vllm serve "m" --port 9000 ${MORE} "', ports=[{"containerPort": 9000}]), 9000),
    ("both branches", script("if [ -e /x ]; then vllm serve a --port 9000; else vllm serve b --port=9000; fi"), 9000),
    ("a function", script("run() { vllm serve m --port 9000; }\nrun"), 9000),
    ("hidden arguments", script('vllm serve m --port 9000 "${@:2}"', ports=[{"containerPort": 9000}]), 9000),
    ("words for the shell", container(command=["sh", "-c", 'vllm serve "$@"', "--"], args=["--port", "9000"]), 9000),
    ("a comment", script("# vllm serve --port 1\nvllm serve m --port 9000 # --port 2"), 9000),
    ("a here-document", script("cat > /dev/null <<EOF\nvllm serve --port 1\nEOF\nvllm serve m --port 9000"), 9000),
    ("talk", script('echo "vllm serve --port 1"; vllm serve m --port 9000'), 9000),
    ("Kubernetes in the script", script("vllm serve m --port $(HTTP)", env=env(HTTP="9000")), 9000),
    ("a file of settings", container(args=["--config=/x.yaml"], ports=[{"containerPort": 8000}]), 8000),
    ("llama.cpp", container(image=LLAMA, args=["-m", "x.gguf"], ports=None), 8080),
    ("llama.cpp by flag", container(image=LLAMA, args=["-m", "x.gguf", "--host", "0.0.0.0", "--port", "9000"]), 9000),
    ("llama.cpp by variable", container(image=LLAMA, args=None, env=env(LLAMA_ARG_PORT="9000")), 9000),
    ("TGI by variable", container(image=TGI, args=["--model-id", "m"], env=env(PORT="9000")), 9000),
    ("TGI by flag", container(image=TGI, args=["--model-id", "m", "-p", "9000"]), 9000),
    ("TGI without a word", container(image=TGI, args=None, env=env(MODEL_ID="m")), 80),
    ("Ollama", container(image="ollama/ollama", args=None, ports=None), 11434),
    ("Ollama by variable", container(image="ollama/ollama", args=["serve"], env=env(OLLAMA_HOST=":9000")), 9000),
    ("Ollama by URL", container(image="ollama/ollama", args=None, env=env(OLLAMA_HOST="http://0.0.0.0:9000")), 9000),
    ("Ollama in a script", script("export OLLAMA_HOST=0.0.0.0:9000\nollama serve & ollama pull m; wait"), 9000),
    ("SGLang", script("python3 -m sglang.launch_server --host=0.0.0.0", ports=None), 30000),
    ("SGLang by its other name", script("sglang serve --host=0.0.0.0 --port=9000"), 9000),
    ("Triton", container(image="nvcr.io/nvidia/tritonserver:25.01", args=["tritonserver", "--http-port=9000"]), 9000),
    ("trtllm-serve", script("trtllm-serve m --host 0.0.0.0 --port 9000"), 9000),
    ("LMDeploy", script("lmdeploy serve api_server m --server-port 9000"), 9000),
]  # fmt: skip


@pytest.mark.parametrize(("given", "port"), [one[1:] for one in TAKEN], ids=[one[0] for one in TAKEN])
def test_auto(given: dict[str, Any], port: int) -> None:
    before = simulate(pod(given))
    assert before.reaches(port) == "engine", before
    result = gated(pod(given))
    assert (result.status["takeover"], result.status["port"]) == ("Auto", port)
    after = simulate(result.pod)
    engine_port = result.status["enginePort"]
    assert after.reaches(port) == GATE
    assert after.reaches(engine_port, inside=True) == "engine"
    assert after.reaches(engine_port) == "nobody"
    assert after.upstream == engine_port


UNTOLD = "write it in spec.engine.port"

LEFT: list[tuple[str, dict[str, Any], str]] = [
    ("TLS", container(args=["--port=8000", "--ssl-keyfile=/k", "--ssl-certfile=/c"]), "serves TLS"),
    ("a socket", container(args=["--uds", "/tmp/s"]), "Unix socket"),
    ("a socket of llama.cpp", container(image=LLAMA, args=["--host", "/tmp/x.sock"]), "Unix socket"),
    ("an address that is told", script("trtllm-serve m --metadata_server_config_file=x"), "tells others its own"),
    ("headless", container(args=["--headless"]), "serves no requests"),
    ("a port from elsewhere", container(args=["--port=$(P)"], env=[from_field("P")], ports=None), UNTOLD),
    ("a port that the script computes", script("vllm serve m --port $(cat /port)", ports=None), UNTOLD),
    ("a default of an unknown image", script("llama-server -m x", ports=None), UNTOLD),
    ("unknown variables", container(image=LLAMA, args=None, envFrom=[{"configMapRef": {}}], ports=None), UNTOLD),
    ("two ports", script("vllm serve a --port 1111 & vllm serve b --port 2222 & wait", ports=None), "different ports"),
    ("hidden words where one flag too many is an error",
     script("text-generation-launcher --port 8000 $MORE", ports=[{"containerPort": 8000}]), "known only when it runs"),
    ("a file of the image", container(command=["/start.sh"], args=None, ports=None), "starts no engine that is known"),
    ("a script of the image", container(command=["bash", "/start.sh"], args=None, ports=None), "not in the manifest"),
    ("an unknown image", container(image="example/x:1", args=["--port=8000"], ports=None), "entrypoint is not known"),
    ("an unknown image and nothing else", container(image="example/x:1", args=None, ports=None), "has no command"),
    ("an eval of the unknown", script('eval "$(cat /cmd)"', ports=None), "an eval of what is known only"),
    ("a quote too many", script("vllm serve 'm", ports=None), "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "why"), [one[1:] for one in LEFT], ids=[one[0] for one in LEFT])
def test_left_alone(given: dict[str, Any], why: str) -> None:
    assert why in refusal(pod(given))


def test_a_port_that_nobody_can_read_is_taken_from_the_policy() -> None:
    given = pod(script("vllm serve m --port $(cat /port)", ports=None))
    result = gated(given, engine={"port": 9000})
    assert result.status["port"] == 9000
    assert simulate(result.pod).reaches(result.status["enginePort"], inside=True) == "engine"


def test_a_port_that_contradicts_the_policy_is_told() -> None:
    why = refusal(pod(), engine={"port": 9000})
    assert "spec.engine.port is 9000" in why
    assert "listens on 8000 (the flag --port)" in why


def test_a_declared_port_that_the_engine_does_not_have_is_told() -> None:
    result = gated(pod(container(ports=[{"containerPort": 8080}])))
    assert result.status["port"] == 8000
    assert any("declares the ports [8080], but listens on 8000" in one for one in result.warnings)


def test_a_port_from_two_witnesses() -> None:
    """Not readable, but declared alone and probed."""
    given = container(
        args=["--port=$(P)"], env=[from_field("P")], readinessProbe={"httpGet": {"path": "/", "port": "http"}}
    )
    assert gated(pod(given)).status["port"] == 8000
    alone = container(args=["--port=$(P)"], env=[from_field("P")], ports=[{"containerPort": 8000}])
    assert UNTOLD in refusal(pod(alone))


def test_the_engines_port_is_free_and_recognisable() -> None:
    taken = env(A="27000", B="27001", C="http://x:27002/")
    assert gated(pod(container(env=taken))).status["enginePort"] == 27003
    assert gated(pod(container(args=["--port=8123"]))).status["enginePort"] == 27123


def test_an_engine_that_shares_its_host_keeps_it() -> None:
    """SGLang's bootstrap server is at the same host: on loopback no other pod would find it."""
    text = "python3 -m sglang.launch_server --host 0.0.0.0 --port 30000 --disaggregation-mode prefill"
    result = gated(pod(script(text, ports=None)))
    assert engine_of(result)["command"][2] == text.replace("--port 30000", "--port 27000")
    assert any("can still be reached past the gate on port 27000" in one for one in result.warnings)


def test_an_images_own_arguments_are_kept() -> None:
    given = container(image="ghcr.io/huggingface/text-embeddings-inference:1.8", args=None, ports=None)
    assert engine_of(gated(pod(given)))["args"] == [
        "--json-output",
        "--port",
        "27080",
        "--hostname",
        "127.0.0.1",
    ]
    ollama = container(image="ollama/ollama", args=None, ports=None)
    assert "args" not in engine_of(gated(pod(ollama)))


def test_host_ports_stay() -> None:
    ports = [{"name": "http", "containerPort": 8000, "hostPort": 80, "hostIP": "10.0.0.1"}]
    result = gated(pod(container(ports=ports)))
    assert engine_of(result)["ports"] == ports
    assert all("hostPort" not in port for port in gate_of(result)["ports"])


def test_an_engine_on_loopback_stays_there() -> None:
    """Then the pod has something of its own in front, which the gate must not open a way around."""
    given = pod(
        container(args=["--host=127.0.0.1", "--port=8000"]), {"name": "auth", "image": "example/nginx"}
    )
    result = gated(given)
    assert "--listen=127.0.0.1:8000" in gate_of(result)["args"]
    after = simulate(result.pod)
    assert (after.reaches(8000), after.reaches(8000, inside=True)) == ("nobody", GATE)


@pytest.mark.parametrize(
    "fields",
    [
        {"args": ["--host=127.0.0.1", "--port=8000"]},
        {"args": ["--host=0.0.0.0", "--port=27000"]},
        {"args": ["--host=127.0.0.1", "--port=$(P)"], "env": [from_field("P")]},
        {"command": ["sleep"]},
    ],
)
def test_what_is_not_read_back_is_not_done(fields: dict[str, Any]) -> None:
    """Whatever went wrong in the writing, the pod stays as it was."""
    before, now = read_engine(0, container()), read_engine(0, container(**fields))
    with pytest.raises(RefusedError, match="cannot be changed with certainty"):
        check_moved(now, before, 27000, hides=True)
    check_moved(
        read_engine(0, container(args=["--host=127.0.0.1", "--port=27000"])), before, 27000, hides=True
    )
    check_moved(read_engine(0, container(args=["--port=27000"])), before, 27000, hides=False)


# Which container.


def test_two_engines_are_not_told_apart() -> None:
    both = pod(container(), container(name="second", args=["--port=8001"], ports=None))
    assert "'engine', 'second' each looks like an engine" in refusal(both)
    assert gated(both, injection={"container": "second"}).status["port"] == 8001
    assert gated(both, engine={"port": 8001}).status["container"] == "second"
    other = pod(container(), container(name="second", image=LLAMA, args=[], ports=None))
    assert gated(other, engine={"type": "llama.cpp"}).status["container"] == "second"


def test_a_container_that_is_not_there() -> None:
    why = refusal(pod(), injection={"container": "main"})
    assert "no container 'main'" in why
    assert "'engine'" in why
    before = pod(initContainers=[{"name": "main", "image": "x", "restartPolicy": "Always"}])
    assert "is an init container" in refusal(before, injection={"container": "main"})


def test_a_pod_without_any_sign_of_an_engine() -> None:
    given = pod({"name": "a", "image": "example/a"}, {"name": "b", "image": "example/b"})
    assert "'a', 'b' none is known to be an engine" in refusal(given)


def test_companions_are_no_engines() -> None:
    proxies = [{"name": name, "image": "x"} for name in ("queue-proxy", "linkerd-proxy")]
    assert gated(pod(container(), *proxies)).status["container"] == "engine"


# NamedPort.


def named(**fields: Any) -> dict[str, Any]:
    return container(command=["/start.sh"], args=None, **fields)


def test_the_name_moves_where_nothing_else_can() -> None:
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 7}
    by_number = {"tcpSocket": {"port": 8000}}
    given = pod(
        named(
            ports=[
                {"name": "http", "containerPort": 8000, "hostPort": 80},
                {"name": "grpc", "containerPort": 8001},
            ],
            readinessProbe=probe,
            livenessProbe=by_number,
        )
    )
    result = gated(given, engine={"port": 8000})
    assert result.status == {
        "takeover": "NamedPort", "container": "engine", "port": 27000, "enginePort": 8000, "engine": "Auto",
        "portName": "http", "warnings": result.status["warnings"],
    }  # fmt: skip
    engine = engine_of(result)
    assert engine["ports"] == [{"containerPort": 8000}, {"name": "grpc", "containerPort": 8001}]
    assert engine["readinessProbe"] == {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 7}
    assert engine["livenessProbe"] == by_number
    assert gate_of(result)["ports"][0] == {
        "name": "http",
        "containerPort": 27000,
        "hostPort": 80,
        "protocol": "TCP",
    }
    assert "--upstream=http://127.0.0.1:8000" in gate_of(result)["args"]
    assert any("cannot be read" in one for one in result.warnings)
    assert any("clients that go by its number 8000" in one for one in result.warnings)


def test_the_only_name_needs_no_port_in_the_policy() -> None:
    assert gated(pod(named())).status["portName"] == "http"


def test_named_port_on_request() -> None:
    result = gated(pod(), injection={"takeover": "NamedPort"})
    assert (result.status["takeover"], result.status["enginePort"]) == ("NamedPort", 8000)
    assert engine_of(result)["args"] == ["--model=m", "--port=8000"]


def test_named_port_without_a_name() -> None:
    why = refusal(pod(container(ports=[{"containerPort": 8000}])), injection={"takeover": "NamedPort"})
    assert "declares no port 8000 with a name" in why


# Explicit.


def explicit(port: int, upstream: int | None) -> dict[str, Any]:
    injection = {"takeover": "Explicit"} | ({} if upstream is None else {"upstreamPort": upstream})
    return {"engine": {"port": port}, "injection": injection}


def test_explicit() -> None:
    result = gated(pod(named()), **explicit(8000, 8001))
    assert (result.status["takeover"], result.status["port"], result.status["enginePort"]) == (
        "Explicit",
        8000,
        8001,
    )
    assert engine_of(result)["command"] == ["/start.sh"]
    assert [port["containerPort"] for port in gate_of(result)["ports"]] == [9901]
    assert any("can be reached past the gate on port 8001" in one for one in result.warnings)


def test_explicit_declares_the_port_that_nobody_does() -> None:
    result = gated(pod(named(ports=None)), **explicit(8000, 8001))
    assert gate_of(result)["ports"][0] == {"containerPort": 8000, "protocol": "TCP"}


def test_explicit_on_loopback_needs_no_warning() -> None:
    assert (
        gated(pod(container(args=["--host=127.0.0.1", "--port=8001"])), **explicit(8000, 8001)).warnings == ()
    )


def test_explicit_that_cannot_work() -> None:
    assert "start the engine on 8001" in refusal(pod(), **explicit(8000, 8001))
    other = {"name": "web", "image": "x", "ports": [{"containerPort": 8080}]}
    injection = {"takeover": "Explicit", "upstreamPort": 8000, "container": "engine"}
    why = refusal(pod(named(), other), engine={"port": 8080}, injection=injection)
    assert "declared by container 'web'" in why


# Pods in front of which no gate can stand.


def test_host_network() -> None:
    assert "hostNetwork" in refusal(pod(hostNetwork=True))


@pytest.mark.parametrize(
    "spec", [{"os": {"name": "windows"}}, {"nodeSelector": {"kubernetes.io/os": "windows"}}]
)
def test_windows(spec: dict[str, Any]) -> None:
    assert "Windows" in refusal(pod(**spec))


def test_the_admin_port_is_taken() -> None:
    other = {"name": "envoy", "image": "x", "ports": [{"containerPort": 9901}]}
    assert "'envoy' has port 9901" in refusal(pod(container(), other))
    assert "gate's own admin port" in refusal(pod(container(args=["--port=9901"], ports=None)))
    named_only = gated(pod(container(), {"name": "envoy", "image": "x", "args": ["--admin=127.0.0.1:9901"]}))
    assert any("names port 9901" in one for one in named_only.warnings)


def test_a_volume_of_that_name() -> None:
    assert "rename it" in refusal(pod(volumes=[{"name": "sluicegate-policy", "emptyDir": {}}]))


@pytest.mark.parametrize(
    ("reference", "program"),
    [
        ("vllm/vllm-openai", "vllm"),
        ("docker.io/vllm/vllm-openai:v0.10.0", "vllm"),
        ("registry.example:5000/a/b/vllm/vllm-openai:latest@sha256:0", "vllm"),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda-b5000", "/app/llama-server"),
        ("ghcr.io/ggml-org/llama.cpp:full", None),
        ("ghcr.io/ggml-org/llama.cpp", None),
        ("example/my-vllm-openai:1", None),
        ("vllm/vllm-openai-fork:1", None),
        ("", None),
    ],
)
def test_images(reference: str, program: str | None) -> None:
    found = find_image(reference)
    assert (found and found.entrypoint[0]) == program
