"""Half a minute of tests/chaos on several clusters at a time, with a fixed seed."""

import chaos
import pytest
from hosts import possible


@pytest.mark.parametrize("shapes", (("sim", "cpu", "tp"), ("sim-disaggregated", "cpu-disaggregated", "sim-outliving")), ids=("colocated", "disaggregated"))
def test_half_a_minute_of_chaos_loses_nothing(figure, tmp_path, shapes):
    chosen = [word for shape in shapes for word in ("--shape", shape)]
    options = chaos.options(["--seed", "4", "--minutes", "0.5", "--log", str(tmp_path / "log.jsonl"), *chosen])
    said = []
    summary = chaos.run(options, say=said.append)
    for line in said:
        figure(f"chaos, {' and '.join(shapes)}: {line}")
    assert chaos.unharmed(summary), (said, [line for line in options.log.read_text().splitlines() if '"bad"' in line][:3])
    # Every cluster has had faults and has recovered.
    assert all(cluster["recoveries"] for cluster in summary["clusters"].values()), summary
    assert sum(cluster["faults"].get("full disk", 0) for cluster in summary["clusters"].values()), summary
    assert sum(cluster["trace_steps_lost"] for cluster in summary["clusters"].values()), "no step trace was lost to a full disk"


@pytest.mark.skipif(not possible(), reason="network namespaces need root's rights")
def test_chaos_over_hosts_with_mutual_tls_loses_nothing(figure, tmp_path):
    options = chaos.options(["--seed", "5", "--minutes", "0.5", "--log", str(tmp_path / "log.jsonl"), "--shape", "mtls"])
    said = []
    summary = chaos.run(options, say=said.append)
    for line in said:
        figure(f"chaos, mtls: {line}")
    assert chaos.unharmed(summary), (said, [line for line in options.log.read_text().splitlines() if '"bad"' in line][:3])
    assert summary["clusters"]["mtls"]["recoveries"], summary
