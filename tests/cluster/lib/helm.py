"""Runs Helm itself, from target/helm (tests/tools/helm). Installs a chart into a `KubernetesApi`, and returns the
rendered objects."""

import ctypes
import functools
import json
import tempfile

import yaml
from harness import REPO
from kubernetes_api import KubernetesApi

CHART = REPO / "deploy/helm/tutti"
LIBRARY = REPO / "target/helm/libhelm_sdkpy.so"
OPTIONS = {
    "create_namespace": False,
    "wait": False,
    "timeout_seconds": 60,
    "wait_for_jobs": False,
    "server_side_apply": "false",
    "disable_openapi_validation": True,
    "skip_schema_validation": False,
}


class Refused(Exception):
    """An error from Helm."""


class Release:
    """An installed chart."""

    def __init__(self, result, created):
        self.notes = result.get("info", {}).get("notes", "")
        self.objects = created
        self._manifest = result["manifest"]
        self.hooks = [yaml.safe_load(hook["manifest"]) for hook in result.get("hooks", [])]

    def manifest(self):
        """Returns all objects that the chart renders, including those that existed before."""
        return [found for found in yaml.safe_load_all(self._manifest) if found]

    def all(self, kind):
        """Returns the objects of a kind, ordered by name."""
        return sorted((o for o in self.objects if o["kind"] == kind), key=lambda o: o["metadata"]["name"])

    def one(self, kind, ending=""):
        """Returns the only object of a kind whose name has this ending."""
        found = [o for o in self.all(kind) if o["metadata"]["name"].endswith(ending)]
        assert len(found) == 1, f"{kind} {ending!r}: {[o['metadata']['name'] for o in self.all(kind)]}"
        return found[0]


@functools.cache
def _library():
    library = ctypes.CDLL(str(LIBRARY))
    library.helm_sdkpy_free.argtypes = [ctypes.c_void_p]
    # The library owns the text of an error, so the caller must not free it.
    library.helm_sdkpy_last_error.restype = ctypes.c_char_p
    return library


def _take(library, result):
    """Returns the text of a result, and frees the result."""
    try:
        return ctypes.string_at(result).decode()
    finally:
        library.helm_sdkpy_free(result)


def merged(base, over):
    """Merges values as Helm does: maps key by key, other values replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


def values_file(name):
    """Returns the values in one of the chart's files, such as `laptop`."""
    return yaml.safe_load((CHART / "values" / f"{name}.yaml").read_text()) or {}


def install(values=None, chart=CHART, name="tutti", namespace="llm", existing=()):
    """Installs a chart with these values over its own, in a cluster with these existing objects. Raises `Refused` with
    Helm's error message."""
    library = _library()
    text = lambda value: ctypes.c_char_p(value.encode())
    with KubernetesApi(existing) as api, tempfile.NamedTemporaryFile("w") as config:
        config.write(api.kubeconfig())
        config.flush()
        handle, result = ctypes.c_ulonglong(), ctypes.c_void_p()

        def check(code):
            if code != 0:
                raise Refused(library.helm_sdkpy_last_error().decode())

        check(library.helm_sdkpy_config_create(text(namespace), text(config.name), None, text("{}"), ctypes.byref(handle)))
        try:
            check(library.helm_sdkpy_install(
                handle, text(name), text(str(chart)), text(json.dumps(values or {})), text(""),
                text(json.dumps(OPTIONS)), ctypes.byref(result),
            ))
            return Release(json.loads(_take(library, result)), api.created)
        finally:
            library.helm_sdkpy_config_destroy(handle)
