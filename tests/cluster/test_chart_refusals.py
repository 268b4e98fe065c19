"""Values that the Helm chart refuses with an error that names the wrong field."""

import platform

import helm
import pytest

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="Helm's library is for x86-64")

SHA256 = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"

# (path, value, the field that Helm's error names, or None for the path's last part)
WRONG = [
    ("conductor.settings.max_step_token", 512, None),
    ("conductor.settings.max_step_tokens", "512", None),
    ("conductor.settings.max_step_tokens", 0, None),
    ("conductor.settings.max_step_tokens", 1 << 21, None),
    ("conductor.settings.chunking", "engines", None),
    ("conductor.settings.chunk_shapes", "64;256", None),
    ("conductor.settings.kv_cache_memory", "half", None),
    ("conductor.settings.kv_cache_memory", 0, None),
    ("conductor.settings.pin_threads", "yes", None),
    ("conductor.settings.heartbeat_timeout", 1, None),
    ("conductor.settings.quantize", "int3", None),
    ("conductor.settings.http", "0.0.0.0:80", None),
    ("conductor.settings.workers", 2, None),
    ("conductor.settings.connections.max_opened", 9, None),
    ("conductor.settings.connections.max_open", 0, None),
    ("conductor.settings.sim.profile", "b200", None),
    ("conductor.settings.router.allowed_origins", "https://a.example", None),
    ("router.settings.max_step_tokens", 512, None),
    ("router.settings.fleet.poll_ms", 0, None),
    ("router.settings.fleet.max_retries", -1, None),
    ("router.settings.log_format", "xml", None),
    ("router.settings.drain_timeout", 30, None),
    ("router.replica", 3, None),
    ("router.replicas", "3", None),
    ("router.drain.lameDuckSeconds", 601, None),
    ("router.drain.timeoutSeconds", 0, None),
    ("router.enabled", "true", None),
    ("router.resources.request", {}, None),
    ("conductor.gpus", "8", None),
    ("conductor.device", "tpu", None),
    ("conductor.workers", 257, None),
    ("conductor.roles", [{"name": "a", "role": "prefil"}], "role"),
    ("conductor.roles", [{"name": "a", "role": "decode", "ranks": 2}], "ranks"),
    ("conductor.roles", [{"role": "decode"}], "name"),
    ("conductor.hugepages.size", "4Mi", None),
    ("conductor.sharedMemory", "2 GB", None),
    ("conductor.podManagementPolicy", "Serial", None),
    ("conductor.autoscaling.with", "vpa", None),
    ("conductor.autoscaling.targetRunning", -1, None),
    ("conductor.startupSeconds", 0, None),
    ("model.uri", "s3://bucket/model", None),
    ("model.uri", "hf://Qwen3", None),
    ("model.init.size", "much", None),
    ("images.cpu.digest", "sha256:12", None),
    ("images.pullPolicy", "Sometimes", None),
    ("ports.http", 70000, None),
    ("apiKeys.entries", [{"name": "alice", "sha256": "abc"}], "sha256"),
    ("apiKeys.entries", [{"name": "alice", "sha256": SHA256, "limits": {"per-minute": 1}}], "per-minute"),
    ("tls.cluster.mode", "tls", None),
    ("tls.cluster.generated.days", 3650, None),
    ("networkPolicy.egress", {}, None),
    ("apiKeys.enabled", "yes", None),
    ("service.type", "External", None),
    ("monitoring.monitor", "yes", None),
    ("monitoring.interval", "15", None),
    ("runAs.user", 0, None),
    ("workers", 2, None),
]
# (values, the field that Helm's error names). Each value is valid, but their combination is not.
CONTRADICTIONS = [
    ({"conductor": {"workers": 3, "tp": 2}}, "conductor.tp"),
    ({"conductor": {"podsPerReplica": 2, "tp": 4}, "model": {"uri": "pvc://m/x"}}, "conductor.tp"),
    ({"conductor": {"podsPerReplica": 2, "workersPerPod": 2, "gpus": 3}, "model": {"uri": "pvc://m/x"}}, "conductor.gpus"),
    ({"conductor": {"podsPerReplica": 2, "roles": [{"name": "a", "role": "decode"}]}, "model": {"uri": "pvc://m/x"}}, "conductor.roles"),
    ({"conductor": {"podsPerReplica": 2}}, "model.uri"),
    ({"conductor": {"hugepages": {"size": "2Mi"}}}, "conductor.hugepages.limit"),
    ({"model": {"uri": "init://m"}}, "model.init.image"),
    ({"tls": {"public": {"enabled": True}}}, "tls.public.secretName"),
    ({"tls": {"cluster": {"mode": "certManager"}}}, "tls.cluster.certManager.issuer"),
    ({"tls": {"cluster": {"mode": "secret"}}}, "tls.cluster.secrets.conductor"),
    ({"tls": {"cluster": {"generated": {"days": 60}}}}, "tls.cluster.generated.renewAfterDays"),
    ({"ingress": {"enabled": True}}, "ingress.hosts"),
    ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parents"),
    ({"gateway": {"inferencePool": {"enabled": True}}}, "gateway.inferencePool.enabled"),
]


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("path, value, field", WRONG)
def test_a_wrong_value_is_refused_with_its_name(path, value, field):
    with pytest.raises(helm.Refused) as refused:
        helm.install(nested(path, value))
    assert (field or path.rpartition(".")[2]) in str(refused.value)
    assert "schema" in str(refused.value)


@pytest.mark.parametrize("values, field", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused_by_name(values, field):
    with pytest.raises(helm.Refused, match=field.replace(".", r"\.")):
        helm.install(values)
