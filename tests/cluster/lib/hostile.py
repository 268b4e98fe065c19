"""Attacks real clusters while a well-behaved client uses them.

Most devices are simulated, so that an answer takes as long as on a GPU and costs this machine little. One cluster is
open to clients; another has API keys and two workers, of which one hands its requests over to the other; a third has a
small model on a CPU that takes pictures and recordings; a fourth takes pictures on a simulated device. For each attack
the table has the good client's p99 time to first token, the growth of the memory of the process that is attacked, and
how the attacker was refused. The exit code is 1 if the good client failed or waited more than twice as long as
undisturbed, if memory grew beyond the attack's bound, or if an attack succeeded.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import omni_model
from api_keys import line
from harness import REPO, Server, wait_for
from hostile_attacks import ATTACKS

HERE = pathlib.Path(__file__).parent
# Timeouts are shorter than the defaults, so that an attack need not last for minutes. Each is still longer than any
# good client needs.
PATIENCE = {
    "TUTTI_CONNECTIONS__HEADER_TIMEOUT_MS": "2000",
    "TUTTI_CONNECTIONS__WRITE_TIMEOUT_MS": "2000",
    "TUTTI_CONNECTIONS__RECEIVE_TIMEOUT_MS": "2000",
    "TUTTI_ROUTER__UPLOAD_TIMEOUT_S": "2",
}
# Costs of the device: the first token of the good client takes about 50 ms.
DEVICE = {"TUTTI_SIM__PROFILE": "instant", "TUTTI_SIM__FIXED_US": "5000", "TUTTI_SIM__PREFILL_NS_PER_TOKEN": "40000"}
# Allowance for noise: on an idle machine, times of a few milliseconds vary by a factor of two.
SLACK_MS = 20


# The good client's API key, at the cluster that asks for one.
KEY = "the-good-client-s-key"


class Attacked(Server):
    """A cluster of one of the kinds that attacks name."""

    def __init__(self, kind, directory):
        flags, device, more = ["--workers", 1], ("--device", "sim"), {}
        # Tokens per prompt of the good client. The prefill takes as long as that of an ordinary request.
        self.prompt = 1000
        if kind == "media":
            # The simulated device takes no sound as a model does. All that the attackers send is refused before it
            # reaches a device. A CPU computes for as long as the simulated device waits, with fewer tokens.
            self.prompt = 300
            device = ("--threads", 1, *omni_model.write(pathlib.Path(directory) / "checkpoint"))
            more = {"TUTTI_ROUTER__MAX_MEDIA_MEMORY": str(64 << 20)}
        if kind == "pictures":
            device = omni_model.write_simulated(pathlib.Path(directory) / "checkpoint")
            more = {"TUTTI_ROUTER__MAX_MEDIA_MEMORY": str(64 << 20)}
        if kind == "guarded":
            keys = pathlib.Path(directory) / "keys"
            keys.write_text(line("good", KEY))
            # Workers that join over TCP exchange planes over TCP, too.
            tcp = ("--worker-listen", "127.0.0.1:0")
            flags = ["--topology", REPO / "deploy/topology/disaggregated.toml", "--api-key-file", keys, *tcp]
        super().__init__("conductor", (*device, *flags), directory, PATIENCE | DEVICE | more)
        self.client.headers["authorization"] = f"Bearer {KEY}"
        self.wait_until_ready()
        self.planes_port = 0
        if kind == "guarded":
            # The receiver of planes listens once it has a first request.
            self.complete(prompt=[1, 2, 3], max_tokens=2, ignore_eos=True)
            listens = lambda: re.search(r"listens for planes.*port=(\d+)|port=(\d+).*listens for planes", self.log())
            wait_for("the port of planes", listens)
            self.planes_port = int(next(filter(None, listens().groups())))

    def victim(self, name):
        """The pid of the process that is attacked. The worker is the one that receives planes."""
        return self.pid if name == "conductor" else self.workers_by_rank()[1]


@dataclasses.dataclass
class Result:
    name: str
    p99_ms: float
    failures: list
    grown_mib: float
    refused: dict
    problems: list


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="length of each attack (default: 15)")
    parser.add_argument("--size", type=float, default=1, help="share of each attack's connections (default: 1)")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), help="attacks (default: all)")
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures as JSON")
    return parser.parse_args(words)


def child(script, *arguments, nice=0):
    # Real attackers use other machines. Here, `nice` leaves them only the processor time that the cluster and its good
    # client do not need.
    command = ["nice", "-n", str(nice), sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def bystander(cluster, seconds):
    asked = ("--http", cluster.http_port, "--model", cluster.model, "--key", KEY, "--seconds", seconds, "--prompt", cluster.prompt)
    return child("hostile_bystander.py", *asked)


def p99(values):
    """The 99th percentile, in milliseconds."""
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)] * 1000


def undisturbed(cluster, seconds):
    said, _ = bystander(cluster, seconds).communicate()
    said = json.loads(said)
    assert not said["failures"], said["failures"][:3]
    return p99(said["seconds"])


def status(pid, field):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {field} in the status of process {pid}")


def attacked(cluster, name, chosen):
    """Runs one attack, and the good client at the same time."""
    attack = ATTACKS[name]
    victim = cluster.victim(attack.process)
    before = status(victim, "VmRSS:")
    pathlib.Path(f"/proc/{victim}/clear_refs").write_text("5")  # the peak begins anew
    addresses = ("--http", cluster.http_port, "--grpc", cluster.grpc_port, "--model", cluster.model)
    addresses += ("--cluster", cluster.cluster.rpartition(":")[2], "--planes", cluster.planes_port)
    attacker = child("hostile_attacks.py", name, *addresses, "--seconds", chosen.seconds, "--size", chosen.size, nice=19)
    good = bystander(cluster, chosen.seconds)
    said = json.loads(good.communicate()[0])
    refused = json.loads(attacker.communicate()[0])
    assert attacker.returncode == 0, f"the attacker {name} failed"
    grown = status(victim, "VmHWM:") - before
    problems = [f"outcome {what}: {count} times" for what, count in refused.items() if what not in attack.allowed]
    if grown > attack.mib:
        problems.append(f"{grown:.0f} MiB more memory, over {attack.mib}")
    if said["failures"]:
        problems.append(f"the good client failed {len(said['failures'])} times: {said['failures'][0]}")
    cluster.wait_until_idle()
    return Result(name, p99(said["seconds"]) if said["seconds"] else float("inf"), said["failures"], grown, refused, problems)


def run(chosen, say=print):
    """Runs the chosen attacks. Returns the undisturbed p99 of each cluster in milliseconds, and the results."""
    names = chosen.only or list(ATTACKS)
    quiet, results = {}, []
    for kind in dict.fromkeys(ATTACKS[name].cluster for name in names):
        with tempfile.TemporaryDirectory() as logs:
            cluster = Attacked(kind, logs)
            try:
                quiet[kind] = undisturbed(cluster, max(chosen.seconds, 4))
                say(f"undisturbed, {kind} cluster: p99 {quiet[kind]:.0f} ms")
                of_kind = [name for name in names if ATTACKS[name].cluster == kind]
                results += [judged(cluster, name, chosen, quiet[kind], say) for name in of_kind]
                cluster.stop()
            except BaseException:
                cluster.destroy()
                raise
    return quiet, results


def judged(cluster, name, chosen, quiet, say):
    """Runs one attack, and compares the good client's times with those of the undisturbed client."""
    result, bound = attacked(cluster, name, chosen), 2 * quiet + SLACK_MS
    if result.p99_ms > bound and not result.problems:
        # Other load on the machine looks like an attack that delays the good client. So the attack is repeated, with
        # measurements of the undisturbed client right before and after it.
        say(f"{name:34} p99 {result.p99_ms:4.0f} ms, once more")
        before = undisturbed(cluster, chosen.seconds)
        result = attacked(cluster, name, chosen)
        bound = 2 * max(quiet, before, undisturbed(cluster, chosen.seconds)) + SLACK_MS
    if result.p99_ms > bound:
        result.problems.append(f"p99 {result.p99_ms:.0f} ms, more than {bound:.0f}")
    said = ", ".join(f"{what}: {count}" for what, count in result.refused.items())
    bad = f" BAD: {'; '.join(result.problems)}" if result.problems else ""
    say(f"{name:34} p99 {result.p99_ms:4.0f} ms, memory {result.grown_mib:+5.0f} MiB, {said}{bad}")
    return result


def main():
    chosen = options()
    quiet, results = run(chosen)
    if chosen.out:
        figures = {"command": ["tests/hostile", *sys.argv[1:]], "cpus": os.cpu_count(), "undisturbed_p99_ms": quiet}
        figures["attacks"] = [dataclasses.asdict(result) for result in results]
        chosen.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(any(result.problems for result in results))


if __name__ == "__main__":
    main()
