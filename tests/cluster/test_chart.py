"""The Helm chart. Tests that Helm renders it, that Kubernetes' schemas accept it, that our executables accept their
rendered arguments, and that a rendered cluster serves a request."""

import base64
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import ssl
import subprocess
import time

import helm
import kubernetes_validate
import pytest
import yaml
from harness import BINARIES, Process, free_port, wait_for
from kubernetes_validate import utils as schemas

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="Helm's library is for x86-64")

FILES = ["laptop", "one-gpu", "eight-gpus", "disaggregated", "multi-node", "encoders"]
VERSIONS = ["1.32", "1.34", "1.37"]
KINDS_OF_EXTENSIONS = {
    "Certificate", "HTTPRoute", "InferencePool", "LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject",
    "ServiceMonitor",
}
SHA256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"

# Values that turn on each part of the chart that no file of values turns on.
EVERYTHING = {
    "router": {
        "settings": {"fleet": {"max_retries": 3}, "router": {"max_body_bytes": 67108864}, "log_format": "json"},
        "drain": {"preStopSeconds": 3},
        "autoscaling": {"enabled": True, "targetRequests": 100},
    },
    "conductor": {
        "settings": {"max_step_tokens": 1048576, "kv_cache_memory": "512MiB", "encoder_cache_memory": 0, "chunk_shapes": "64,1048576",
                     "connections": {"receive_room_bytes": 1073741824}, "sim": {"seed": 7}},
        "drain": {"preStopSeconds": 2},
        "autoscaling": {"enabled": True, "targetRunning": 96},
        "extraEnv": [{"name": "RUST_BACKTRACE", "value": "1"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "serving",
    },
    "model": {"uri": "hf://Qwen/Qwen3-0.6B", "servedName": "small", "hf": {"endpoint": "https://hub.example"}},
    "apiKeys": {"entries": [{"name": "alice", "sha256": SHA256, "limits": {"concurrent": 8, "tokens-per-minute": 1000000}}]},
    "tls": {
        "public": {"enabled": True, "certManager": {"issuer": "public", "dnsNames": ["llm.example"]}},
        "cluster": {"mode": "certManager", "certManager": {"issuer": "cluster"}},
    },
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example"], "tlsSecret": "llm"},
    "gateway": {
        "httpRoute": {"enabled": True, "parents": [{"name": "public"}], "hostnames": ["llm.example"]},
    },
    "monitoring": {"monitor": "service", "rules": {"enabled": True}, "dashboards": {"enabled": True}},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}], "monitoring": [{"podSelector": {}}]},
    "images": {"registry": "registry.example/llm/", "pullSecrets": ["registry"],
               "router": {"digest": "sha256:" + "0" * 64}},
}
POOL = {
    "router": {"enabled": False},
    "conductor": {"replicas": 3},
    "gateway": {"httpRoute": {"enabled": True, "parents": [{"name": "public"}]}, "inferencePool": {"enabled": True}},
    "monitoring": {"monitor": "pod"},
    "tls": {"public": {"enabled": True, "secretName": "llm"}},
    "apiKeys": {"existingSecret": "keys"},
}
CASES = {"default": {}, "everything": EVERYTHING, "pool": POOL} | {name: helm.values_file(name) for name in FILES}


@functools.cache
def release(case):
    return helm.install(CASES[case])


def pods(release):
    """Yields (name, spec) of each kind of pod."""
    for kind in release.objects:
        if kind["kind"] in ("Deployment", "StatefulSet"):
            yield kind["metadata"]["name"], kind["spec"]["template"]["spec"]
        if kind["kind"] == "LeaderWorkerSet":
            template = kind["spec"]["leaderWorkerTemplate"]
            yield "leader", template["leaderTemplate"]["spec"]
            yield "worker", template["workerTemplate"]["spec"]
    for hook in release.hooks:
        yield hook["metadata"]["name"], hook["spec"]


def mounted(release, pod, container, directory):
    """Writes the ConfigMaps and Secrets that a container mounts into a directory. Returns a function that translates
    paths."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container.get("volumeMounts", []):
        volume, target = volumes[mount["name"]], directory / mount["mountPath"].lstrip("/")
        if not mount["mountPath"].startswith("/etc/tutti"):
            continue
        target.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in release.one("ConfigMap", volume["configMap"]["name"])["data"].items():
                (target / name).write_text(text)
        else:
            found = [s for s in release.all("Secret") if s["metadata"]["name"] == volume["secret"]["secretName"]]
            for secret in found:
                for name, text in secret.get("data", {}).items():
                    (target / name).write_bytes(base64.b64decode(text))
                for name, text in secret.get("stringData", {}).items():
                    (target / name).write_text(text)
    return lambda argument: argument.replace("/etc/tutti/", f"{directory}/etc/tutti/")


def command_line(container, variables):
    """Returns a container's command line, with variables replaced as Kubernetes does."""
    words = [*container["command"], *container.get("args", [])]
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


@pytest.fixture(scope="module", autouse=True)
def fast_schemas():
    """Caches Kubernetes' schemas, so that each file is read only once."""
    whole, schemas.schema_contents = schemas.schema_contents, functools.cache(schemas.schema_contents)
    yield
    schemas.schema_contents = whole


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_all_objects(case):
    rendered = release(case)
    # Kubernetes' schemas do not cover extensions. They do cover pods, including the pods of extensions.
    objects = [o for o in rendered.objects + rendered.hooks if o["kind"] not in KINDS_OF_EXTENSIONS]
    objects += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec} for name, spec in pods(rendered)
    ]
    assert len(objects) > 5
    names = [(o["kind"], o["metadata"]["name"]) for o in rendered.objects]
    assert len(names) == len(set(names)), "one object would replace the other"
    for version, found in itertools.product(VERSIONS, objects):
        kubernetes_validate.validate(found, version, strict=True)


def test_what_kubernetes_would_refuse_is_found():
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "imag": "i"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


@pytest.mark.parametrize("case", CASES)
def test_pods_have_no_more_rights_than_they_need(case):
    for name, pod in pods(release(case)):
        assert pod["automountServiceAccountToken"] is False, name
        # Otherwise Kubernetes would add a variable TUTTI_... for each service, and our executables would read it as a
        # setting.
        assert pod["enableServiceLinks"] is False, name
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"] + pod.get("initContainers", []):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name


def flag(words, name):
    values = [word.partition("=")[2] for word in words if word.split("=")[0] == f"--{name}"]
    return values[0] if values else None


@pytest.mark.parametrize("case", CASES)
def test_our_executables_accept_what_the_chart_tells_them(case, tmp_path):
    rendered, seen = release(case), set()
    values = helm.merged(yaml.safe_load((helm.CHART / "values.yaml").read_text()), CASES[case])
    for name, pod in pods(rendered):
        for container in pod["containers"]:
            program = container["command"][0]
            if program not in ("conductor", "router"):
                continue
            translate = mounted(rendered, pod, container, tmp_path / name)
            words = [translate(word) for word in command_line(container, {})]
            env = {variable["name"]: variable.get("value", "secret") for variable in container["env"]}
            printed = subprocess.run([BINARIES / program, *words[1:], "--print-config"], env=env, capture_output=True, text=True)
            assert printed.returncode == 0, printed.stderr
            config = json.loads(printed.stdout)
            part = values[program]
            drain = part["drain"]
            assert (config["drain_timeout"], config["lame_duck"]) == (drain["timeoutSeconds"], drain["lameDuckSeconds"])
            grace = pod["terminationGracePeriodSeconds"]
            assert grace >= drain.get("preStopSeconds", 0) + config["drain_timeout"] + config["lame_duck"] + 5
            assert container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) == drain.get("preStopSeconds", 0)
            # Each setting in the values reaches the file unchanged.
            for key, value in part["settings"].items():
                table = value if isinstance(value, dict) else {None: value}
                for inner, wanted in table.items():
                    found = config[key] if inner is None else config[key][inner]
                    assert str(found) == str(wanted) or found == [int(n) for n in str(wanted).split(",")], (key, inner)
            # Each file that a flag names is mounted, if the chart itself makes the file.
            made = {s["metadata"]["name"] for s in rendered.all("Secret")}
            volumes = {v["name"]: v for v in pod["volumes"]}
            for mount in container["volumeMounts"]:
                secret = volumes[mount["name"]].get("secret", {}).get("secretName")
                if secret in made:
                    used = [w for w in words if f"{mount['mountPath']}/" in w]
                    assert used, f"{mount['mountPath']} is mounted for no flag"
                    for word in used:
                        assert os.path.exists(word.partition("=")[2]), word
            seen.add(program)
    assert "conductor" in seen and ("router" in seen) == values["router"]["enabled"]


@pytest.mark.parametrize("case", CASES)
def test_probes_and_services_reach_ports_that_a_container_has(case):
    rendered = release(case)
    by_labels = []
    for found in rendered.objects:
        template = found.get("spec", {}).get("template") or found.get("spec", {}).get("leaderWorkerTemplate", {}).get("leaderTemplate")
        if template:
            names = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
            words = [w for c in template["spec"]["containers"] for w in c.get("args", [])]
            for name, flag_name in {"http": "http", "grpc": "grpc", "operations": "operations", "cluster": "cluster-grpc", "workers": "worker-listen"}.items():
                if name in names:
                    assert flag(words, flag_name) == f"0.0.0.0:{names[name]}"
            for container in template["spec"]["containers"]:
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    if container.get("ports"):
                        assert container[probe]["httpGet"]["port"] == "operations"
            by_labels.append((template["metadata"]["labels"], names))
    for service in rendered.all("Service"):
        selected = [names for labels, names in by_labels if service["spec"]["selector"].items() <= labels.items()]
        assert selected, service["metadata"]["name"]
        for port, names in itertools.product(service["spec"]["ports"], selected):
            assert port["targetPort"] in names
    for policy in rendered.all("NetworkPolicy"):
        cluster = [rule for rule in policy["spec"]["ingress"] if {"port": 50052} in rule.get("ports", [])]
        for rule in cluster:
            labels = rule["from"][0]["podSelector"]["matchLabels"]
            assert labels["app.kubernetes.io/component"] == "router" and len(rule["from"]) == 1


def test_values_files_say_what_their_names_say():
    def topology(case):
        return yaml.safe_load(release(case).one("ConfigMap", "-conductor")["data"]["topology.yaml"])["group"]

    def conductor(case):
        return next(c for _, pod in pods(release(case)) for c in pod["containers"] if c["command"] == ["conductor"])

    gpus = {case: conductor(case)["resources"]["limits"].get("nvidia.com/gpu", 0) for case in FILES}
    assert gpus == {"laptop": 0, "one-gpu": 1, "eight-gpus": 8, "disaggregated": 8, "multi-node": 0, "encoders": 4}
    assert [(g["name"], g["walks"], g["tp"] * g["replicas"]) for g in topology("disaggregated")] == [
        ("prefill", ["prefill_text"], 4), ("decode", ["thinker_decode"], 4),
    ]
    assert [g["nodes"] for g in topology("encoders")] == [["audio_encoder"], ["thinker"], ["thinker"]]
    assert topology("multi-node") == [{"name": "all", "replicas": 1, "tp": 16, "spawn": False}]
    # Each of the sixteen ranks is one container with one GPU.
    ranks = []
    for index, (_, pod) in enumerate(p for p in pods(release("multi-node")) if p[0] in ("leader", "worker")):
        for container in pod["containers"]:
            if container["command"][0] == "/bin/sh":
                assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
                line = container["command"][2].replace("exec worker --rank=", "echo ").replace('"$@"', "")
                ranks.append(subprocess.check_output(["/bin/sh", "-c", line], env={"LWS_WORKER_INDEX": str(index)}))
    assert [int(rank) for rank in ranks] == list(range(16))
    assert not release("laptop").all("Secret") and not release("laptop").all("Deployment")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in release("laptop").notes


def test_dashboards_and_rules_are_taken_from_files():
    everything = release("everything")
    names = {path.stem for path in (helm.CHART / "files/dashboards").glob("*.json")}
    found = [c for c in everything.all("ConfigMap") if "grafana_dashboard" in c["metadata"]["labels"]]
    assert len(found) == len(names)
    for dashboard in found:
        json.loads(next(iter(dashboard["data"].values())))
    rules = everything.all("PrometheusRule")
    assert len(rules) == len(list((helm.CHART / "files/rules").glob("*.yaml")))
    for rule in rules:
        assert rule["spec"]["groups"]


def test_the_chart_has_the_version_of_the_workspace():
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.*)"$', (helm.REPO / "Cargo.toml").read_text(), re.M)
    assert chart["appVersion"] == chart["version"] == version
    assert f"tutti-cpu:{version}" in (helm.REPO / "deploy/README.md").read_text()


def test_each_value_of_the_schema_has_a_default():
    """A value with a default has a line in values.yaml, with a comment that explains the value."""
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    schema = json.loads((helm.CHART / "values.schema.json").read_text())

    def absent(schema, values, path):
        for name, inner in schema.get("properties", {}).items():
            if name not in values:
                yield f"{path}{name}"
            elif isinstance(values[name], dict) and "$ref" not in inner and values[name]:
                yield from absent(inner, values[name], f"{path}{name}.")

    assert list(absent(schema, values, "")) == ["global"]


def test_an_upgrade_keeps_the_secrets_that_the_chart_has_made():
    """An upgrade must keep the secrets, so that old and new routers and conductors accept each other."""
    before = release("default").all("Secret")
    assert len(before) == 4
    after = helm.install(existing=before).manifest()
    secrets = {s["metadata"]["name"]: s["data"] for s in after if s["kind"] == "Secret"}
    assert secrets == {s["metadata"]["name"]: s["data"] for s in before}
    # Another installation has other secrets.
    others = {s["metadata"]["name"]: s["data"] for s in helm.install().all("Secret")}
    assert all(others[name] != data for name, data in secrets.items())
    # The chart refuses to issue one missing certificate, because another authority would sign it.
    with pytest.raises(helm.Refused, match="tutti-router-cluster-tls"):
        helm.install(existing=[s for s in before if s["metadata"]["name"] != "tutti-router-cluster-tls"])


def data(objects):
    return {found["metadata"]["name"]: found["data"] for found in objects if found["kind"] == "Secret"}


def certificates(text):
    """Returns the certificates of a file of a secret, in PEM form."""
    return re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", base64.b64decode(text).decode(), re.S)


def aged(secrets, days):
    """Returns secrets as they would be if the chart had made them so many days ago."""
    made = lambda secret: int(base64.b64decode(secret["data"]["made"])) - days * 86400
    old = [s | {"data": s["data"] | {"made": base64.b64encode(str(made(s)).encode()).decode()}} for s in secrets if "made" in s["data"]]
    return [s for s in secrets if "made" not in s["data"]] + old


def verified(directory, certificate, authorities):
    (directory / "ca.pem").write_text("".join(authorities))
    (directory / "cert.pem").write_text(certificate)
    found = subprocess.run(["openssl", "verify", "-CAfile", "ca.pem", "cert.pem"], cwd=directory, capture_output=True)
    return found.returncode == 0


def valid_days(directory, certificate):
    (directory / "cert.pem").write_text(certificate)
    text = subprocess.check_output(["openssl", "x509", "-in", "cert.pem", "-noout", "-enddate"], cwd=directory, text=True)
    return (ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter=")) - time.time()) / 86400


def test_an_upgrade_renews_certificates_and_no_pod_ever_meets_one_that_it_does_not_trust(tmp_path):
    secrets = release("default").all("Secret")
    parts = ("tutti-router-cluster-tls", "tutti-conductor-cluster-tls")
    for days in (29, 31, 31):
        before = data(secrets)
        after = data(helm.install(existing=aged(secrets, days)).manifest())
        secrets = [s | {"data": after[s["metadata"]["name"]]} for s in secrets]
        # Pods read their files at different times: each trusts the certificates of the others, old and new.
        for one, other in itertools.product(parts, parts):
            for reader, shown in itertools.product((before, after), (before, after)):
                (certificate,) = certificates(shown[other]["tls.crt"])
                assert verified(tmp_path, certificate, certificates(reader[one]["ca.crt"])), (one, other, days)
        for part in parts:
            assert (before[part]["tls.crt"] == after[part]["tls.crt"]) == (days < 30)
            assert (before[part]["ca.crt"] == after[part]["ca.crt"]) == (days < 30)
            for certificate in (*certificates(after[part]["tls.crt"]), *certificates(after[part]["ca.crt"])):
                assert 0 < valid_days(tmp_path, certificate) <= 366
        # An authority that signs nothing any more is not trusted for ever.
        assert len(certificates(after[parts[0]]["ca.crt"])) <= 3
    # Certificates that nobody has renewed in time are replaced, all at once.
    after = data(helm.install(existing=aged(secrets, 400)).manifest())
    assert len(certificates(after[parts[0]]["ca.crt"])) == 2
    (certificate,) = certificates(after[parts[0]]["tls.crt"])
    assert verified(tmp_path, certificate, certificates(after[parts[1]]["ca.crt"]))


def test_an_upgrade_of_a_release_without_next_certificates_keeps_those_in_use(tmp_path):
    """An older chart made certificates for ten years, and no next ones."""
    old = [s for s in release("default").all("Secret") if not s["metadata"]["name"].endswith("-next")]
    found = [s for s in helm.install(existing=old).manifest() if s["kind"] == "Secret"]
    # The release owns them.
    secrets = [s | {"metadata": old[0]["metadata"] | {"name": s["metadata"]["name"]}} for s in found]
    before, after, part = data(old), data(secrets), "tutti-router-cluster-tls"
    assert before[part]["tls.crt"] == after[part]["tls.crt"]
    renewed = data(helm.install(existing=aged(secrets, 31)).manifest())
    assert renewed[part]["tls.crt"] == after["tutti-cluster-tls-next"]["router.crt"]
    (certificate,) = certificates(renewed[part]["tls.crt"])
    assert verified(tmp_path, certificate, certificates(after[part]["ca.crt"]))


def test_one_value_turns_keys_on(start, tmp_path):
    rendered = helm.install({"router": {"enabled": False}, "apiKeys": {"enabled": True}})
    (conductor,) = (c for _, pod in pods(rendered) for c in pod["containers"] if c["command"] == ["conductor"])
    assert "--api-key-file=/etc/tutti/keys/keys" in conductor["args"]
    key = base64.b64decode(rendered.one("Secret", "api-key")["data"]["key"]).decode()
    file = rendered.one("Secret", "api-keys")["stringData"]["keys"]
    assert len(key) == 40 and hashlib.sha256(key.encode()).hexdigest() in file and key not in file
    assert "tutti-api-key" in rendered.notes
    # No pod of the cluster gets the key itself, and an upgrade keeps it.
    mounted = [v["secret"]["secretName"] for name, pod in pods(rendered) if "first-token" not in name for v in pod["volumes"] if "secret" in v]
    assert "tutti-api-keys" in mounted and "tutti-api-key" not in mounted
    kept = helm.install({"router": {"enabled": False}, "apiKeys": {"enabled": True}}, existing=[rendered.one("Secret", "api-key")])
    assert file in [s["stringData"]["keys"] for s in kept.manifest() if s["metadata"]["name"] == "tutti-api-keys"]
    keys = tmp_path / "keys"
    keys.write_text(file)
    cluster = start("--workers", 1, "--api-key-file", keys)
    assert run_helm_test(rendered, cluster.url, TUTTI_KEY=key).returncode == 0
    assert run_helm_test(rendered, cluster.url).returncode != 0


def egress(rendered, part):
    """Returns (ports, components of pods) of each rule of a part. No ports and no components: all."""
    policy = rendered.one("NetworkPolicy", f"-{part}")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    component = lambda peer: peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
    ports = lambda rule: tuple(sorted({port["port"] for port in rule.get("ports", [])}))
    return {(ports(rule), tuple(component(peer) for peer in rule.get("to", []))) for rule in policy["egress"]}


def test_pods_reach_no_more_than_they_need():
    dns = ((53,), ())
    assert egress(release("default"), "router") == {dns, ((50052,), ("conductor",))}
    assert egress(release("default"), "conductor") == {dns}
    hub = helm.install({"model": {"uri": "hf://a/b", "hf": {"endpoint": "http://mirror.example:8081"}},
                        "conductor": {"settings": {"otlp_endpoint": "http://collector:4318"}},
                        "networkPolicy": {"egress": [{"ports": [{"port": 3128}]}]}})
    assert egress(hub, "conductor") == {dns, ((4318,), ()), ((8081,), ()), ((3128,), ())}
    assert egress(hub, "router") == {dns, ((50052,), ("conductor",)), ((3128,), ())}
    workers = ((), ("conductor", "worker"))
    nodes = release("multi-node")
    assert {workers, dns} <= egress(nodes, "conductor") and {workers, dns} <= egress(nodes, "worker")


@pytest.mark.parametrize("kind, values", [("HorizontalPodAutoscaler", "hpa"), ("ScaledObject", "keda")])
def test_conductors_scale_by_what_waits_and_by_what_runs(kind, values):
    def targets(**autoscaling):
        rendered = helm.install({"conductor": {"autoscaling": {"enabled": True, "with": values, **autoscaling}}})
        spec = next(found["spec"] for found in rendered.all(kind) if found["metadata"]["name"].endswith("conductor"))
        if kind == "ScaledObject":
            triggers = [trigger["metadata"] for trigger in spec["triggers"]]
            return {re.search(r"tutti_conductor_(\w+)", t["query"])[1]: t["threshold"] for t in triggers}
        pods = [metric["pods"] for metric in spec["metrics"]]
        return {pod["metric"]["name"].removeprefix("tutti_conductor_"): pod["target"]["averageValue"] for pod in pods}

    assert targets(targetWaiting=5) == {"requests_waiting": "5"}
    assert targets(targetRunning=96) == {"requests_waiting": "8", "requests_running": "96"}


def run_helm_test(rendered, url, **variables):
    """Runs the container of `helm test` on this machine, against a cluster at this address."""
    container = rendered.hooks[0]["spec"]["containers"][0]
    given = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    words = [*container["command"], *container["args"]]
    return subprocess.run(words, env=os.environ | given | {"TUTTI_URL": url} | variables, capture_output=True, text=True)


def test_the_container_of_helm_test_tells_a_cluster_that_answers_from_one_that_does_not(tiny):
    done = run_helm_test(release("laptop"), tiny.url)
    assert done.returncode == 0 and '"content"' in done.stdout, done.stdout + done.stderr
    # An answer whose status differs from the expected one is a failure.
    done = run_helm_test(release("laptop"), tiny.url, TUTTI_EXPECTED="401")
    assert done.returncode != 0
    done = run_helm_test(release("laptop"), f"{tiny.url}/nothing-here")
    assert done.returncode != 0


def test_keys_of_the_values_let_their_owners_in(start, tmp_path):
    """Uses the rendered file of keys in a live cluster. `helm test` sends a key if it has one, and otherwise expects a
    refusal."""
    digest = hashlib.sha256(b"open sesame").hexdigest()
    entry = {"name": "alice", "sha256": digest, "limits": {"concurrent": 2, "tokens-per-minute": 10000000}}
    values = {"router": {"enabled": False}, "apiKeys": {"entries": [entry]}}
    keyless = helm.install(values)
    keys = tmp_path / "keys"
    keys.write_text(keyless.one("Secret", "api-keys")["stringData"]["keys"])
    assert "tokens-per-minute=10000000" in keys.read_text()
    cluster = start("--workers", 1, "--api-key-file", keys)
    done = run_helm_test(keyless, cluster.url)
    assert done.returncode == 0 and "status 401" in done.stdout, done.stdout + done.stderr
    with_key = helm.install(values | {"test": {"keySecret": {"name": "key"}}})
    done = run_helm_test(with_key, cluster.url, TUTTI_KEY="open sesame")
    assert done.returncode == 0 and "status 200" in done.stdout, done.stdout + done.stderr
    assert run_helm_test(with_key, cluster.url, TUTTI_KEY="open barley").returncode != 0


@pytest.mark.parametrize(
    "uri, flags",
    [
        ("", []),
        ("hf://Qwen/Qwen3-0.6B", ["--model=Qwen/Qwen3-0.6B"]),
        ("pvc://models", ["--model=/models/"]),
        ("pvc://models/a/b", ["--model=/models/a/b"]),
        ("init://a", ["--model=/models/a"]),
    ],
)
def test_a_model_is_where_its_uri_says(uri, flags):
    rendered = helm.install({"model": {"uri": uri, "hf": {"tokenSecret": {"name": "hub"}, "cacheClaim": "cache"}, "init": {"image": "fetch"}}})
    pod = rendered.one("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [word for word in container["args"] if word.startswith("--model")] == flags
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == {"hf": ["cache"], "pvc": ["models"]}.get(uri.split(":")[0], [])
    names = {variable["name"] for variable in container["env"]}
    assert ({"HF_TOKEN", "HF_HOME"} <= names) == uri.startswith("hf:")
    assert [c["image"] for c in pod.get("initContainers", [])] == (["fetch"] if uri.startswith("init") else [])


def test_pods_of_a_replica_that_spans_nodes_serve_a_request(tmp_path):
    """Runs the rendered command lines of a router, a conductor and its two workers, in two pods, with the certificates
    and the secret that the chart makes. Only paths, ports and host names are replaced."""
    values = {"conductor": {"podsPerReplica": 2, "tp": 2, "settings": {"threads": 1}}, "model": {"uri": "init://tiny", "init": {"image": "i"}}}
    rendered = helm.install(values)
    model = helm.REPO / "tests/tutti-tiny/checkpoint"
    ports = {name: free_port() for name in ("conductor-http", "conductor-grpc", "conductor-operations", "router-http", "router-grpc", "router-operations", "cluster", "workers")}

    def local(words, program, translate):
        for word in words:
            word = translate(word).replace("/models/tiny", str(model))
            for number, name in {8000: "http", 50051: "grpc", 9090: "operations"}.items():
                word = word.replace(f"0.0.0.0:{number}", f"127.0.0.1:{ports.get(f'{program}-{name}')}")
            word = word.replace("0.0.0.0:50052", f"127.0.0.1:{ports['cluster']}").replace("0.0.0.0:7000", f"127.0.0.1:{ports['workers']}")
            word = word.replace("tutti-conductor.llm.svc.cluster.local:50052", f"localhost:{ports['cluster']}")
            yield word.replace(":7000", f":{ports['workers']}")

    processes = []
    try:
        for name, pod in pods(rendered):
            for container in pod["containers"] if name != "tutti-first-token" else []:
                translate = mounted(rendered, pod, container, tmp_path / name)
                index = "1" if name == "worker" else "0"
                words = command_line(container, {"LWS_LEADER_ADDRESS": "127.0.0.1"})
                program = container["command"][0]
                words = list(local(words, program, translate))
                if program == "/bin/sh":
                    # The shell finds `worker` in the path, as in an image. It drops the executable's path, which
                    # `Process` adds.
                    env = {"LWS_WORKER_INDEX": index, "PATH": f"{BINARIES}:{os.environ['PATH']}"}
                    under = [*words[:2], f"shift; {words[2]}", words[3]]
                    processes.append(Process("worker", words[4:], tmp_path, env, under))
                else:
                    processes.append(Process(program, words[1:], tmp_path))
        url = f"http://127.0.0.1:{ports['router-http']}"

        def ready():
            for process in processes:
                assert process.child.poll() is None, process.explain("ended")
            operations = f"http://127.0.0.1:{ports['router-operations']}/ready"
            return subprocess.run(["curl", "-sf", operations], capture_output=True).returncode == 0

        wait_for("the router is ready", ready, 90)
        done = run_helm_test(rendered, url)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for process in processes:
            process.destroy()
