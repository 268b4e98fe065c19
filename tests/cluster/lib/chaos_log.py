"""The log of a chaos run: a JSON line for each fault and for each failed request, and counts for the summary."""

import collections
import json
import statistics
import time

from harness import machine


class Cluster:
    """The counts of one cluster."""

    def __init__(self):
        self.faults, self.recovery, self.requests = collections.Counter(), [], collections.Counter()
        self.trace_steps_lost = self.replays = 0

    def summary(self):
        recovery = sorted(self.recovery) or [0]
        return {
            "faults": dict(self.faults),
            "requests": self.requests["requests"],
            "recoveries": len(self.recovery),
            "recover_p50_s": round(statistics.median(recovery), 3),
            "recover_max_s": round(recovery[-1], 3),
            "replays": self.replays,
            "trace_steps_lost": self.trace_steps_lost,
        }


class Log:
    """Counts per cluster, and log lines for faults and failures."""

    def __init__(self, path, seed):
        self.file, self.began, self.seed = path.open("w"), time.monotonic(), seed
        self.clusters, self.leaked = collections.defaultdict(Cluster), []
        self.write(seed=seed)

    def write(self, **what):
        self.file.write(json.dumps({"at": round(time.monotonic() - self.began, 3)} | what) + "\n")
        self.file.flush()

    def fault(self, name, kind, **how):
        self.clusters[name].faults[kind] += 1
        self.write(cluster=name, fault=kind, **how)

    def count(self, name, what):
        self.clusters[name].requests[what] += 1

    def bad(self, name, kind, **what):
        self.count(name, kind)
        self.write(cluster=name, bad=kind, **what)

    def leak(self, name, problem):
        self.leaked.append(f"{name}: {problem}")
        self.write(cluster=name, bad="leaked", why=str(problem))

    def summary(self, minutes):
        """Returns the summary of all clusters as one JSON object."""
        clusters = self.clusters.values()
        recovery = sorted(seconds for cluster in clusters for seconds in cluster.recovery) or [0]
        counts = {what: sum(cluster.requests[what] for cluster in clusters) for what in ("requests", "cancelled", "refused", "lost", "wrong")}
        return {
            "seed": self.seed,
            "minutes": minutes,
            "machine": machine(),
            "faults": sum(cluster.faults.total() for cluster in clusters),
            **counts,
            "leaked": len(self.leaked),
            "replays": sum(cluster.replays for cluster in clusters),
            "recover_p50_s": round(statistics.median(recovery), 3),
            "recover_max_s": round(recovery[-1], 3),
            "clusters": {name: cluster.summary() for name, cluster in self.clusters.items()},
        }
