"""The part of a Kubernetes API server that `helm install` needs: the list of kinds, and storage for new objects.

Nothing is run or validated. Tests read `created`, the objects in the order in which Helm sent them.
"""

import http.server
import json
import threading

VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}

# {group and version: {kind: plural name}} of Kubernetes' own kinds, and of extensions that the chart has objects for.
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Namespace": "namespaces",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "cert-manager.io/v1": {"Certificate": "certificates"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": "leaderworkersets"},
    "monitoring.coreos.com/v1": {
        "PodMonitor": "podmonitors",
        "PrometheusRule": "prometheusrules",
        "ServiceMonitor": "servicemonitors",
    },
}


# In this form, Helm gets all kinds with one request. If it had to ask for each group, its rate limit would slow it
# down.
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def _resource(group, version, kind, plural):
    return {
        "resource": plural,
        "responseKind": {"group": group, "version": version, "kind": kind},
        "scope": "Cluster" if kind == "Namespace" else "Namespaced",
        "singularResource": kind.lower(),
        "verbs": ["create", "delete", "get", "list", "patch", "update"],
    }


def _discovery(is_core):
    """Returns all kinds: either Kubernetes' oldest ones, which have no group, or those with a group."""
    items = []
    for group_version, kinds in KINDS.items():
        group, _, version = group_version.rpartition("/")
        if (not group) == is_core:
            resources = [_resource(group, version, kind, plural) for kind, plural in kinds.items()]
            items.append({"metadata": {"name": group}, "versions": [{"version": version, "resources": resources}]})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "items": items}


def _kinds(path):
    """Returns the kinds of one group and version, which a template's `lookup` needs; None for another path."""
    group_version = path.removeprefix("/apis/" if path.startswith("/apis/") else "/api/")
    if group_version not in KINDS:
        return None
    resources = [
        {"name": plural, "singularName": kind.lower(), "namespaced": kind != "Namespace", "kind": kind, "verbs": ["get"]}
        for kind, plural in KINDS[group_version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one write, for which Helm need not wait
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _answer(self, status, body, content_type="application/json"):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path in ("/api", "/apis"):
            return self._answer(200, _discovery(path == "/api"), DISCOVERY)
        found = VERSION if path == "/version" else _kinds(path) or self.server.objects.get(path)
        if found is None:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            return self._answer(404, status | {"message": f"{path} not found"})
        self._answer(200, found)

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        # Helm stores its releases as secrets in protobuf. They are returned unchanged.
        if self.headers["Content-Type"] != "application/json":
            return self._answer(201, text, self.headers["Content-Type"])
        body = json.loads(text)
        path = self.path.partition("?")[0]
        self.server.created.append(body)
        self.server.objects[f"{path}/{body['metadata']['name']}"] = body
        self._answer(201, body)

    do_PUT = do_POST

    def do_PATCH(self):
        """Changes nothing, because tests read Helm's wanted objects from the manifest."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, self.server.objects[self.path.partition("?")[0]])


class KubernetesApi(http.server.ThreadingHTTPServer):
    """The server. It listens on a free port until its `with` block ends."""

    daemon_threads = True

    def __init__(self, existing=()):
        """`existing` are objects that the cluster already has."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created, self.objects = [], {}
        for found in existing:
            group = found["apiVersion"]
            root = f"/{'apis' if '/' in group else 'api'}/{group}"
            metadata, plural = found["metadata"], KINDS[group][found["kind"]]
            self.objects[f"{root}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"] = found

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def kubeconfig(self):
        """Returns the text of a kubeconfig file for this server."""
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "here", "user": {}}],
        })
