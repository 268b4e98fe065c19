"""The commands in README and docs, and the list that says what runs each of them."""

import dataclasses
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# The test that runs commands as they are written.
AS_WRITTEN = "tests/cluster/test_docs.py"
BENCH = "not run: takes minutes to hours on a quiet machine; clippy builds it"
PEOPLE = "not run: for people, and other values need other machines"

# (pattern of the whole command, what runs it). If the second text begins with a path up to a colon or comma, this path
# must be an existing test.
COMMANDS = [
    (r"cargo run --release --bin conductor -- --workers 2", AS_WRITTEN),
    (r"cargo run --release --bin conductor -- --workers 2 --model Qwen/.*|conductor --workers [12] --model Qwen/.*", "tests/cluster/test_hub.py: from a hub on this machine"),
    (r"cargo run --release --bin conductor -- FLAGS", "tests/cluster/test_docs.py: with flags"),
    (r"conductor --workers 2 --model /path/.*", "tests/cluster/test_golden.py: directories that exist"),
    (r"conductor --workers 2|conductor --workers 4 --tp 2|conductor --version", AS_WRITTEN),
    (r"(conductor|router) --config deploy/\S+ --print-config", AS_WRITTEN),
    (r"conductor .*--no-router .*|router --conductor http:.*", AS_WRITTEN),
    (r"router --conductor https:.*", "tests/cluster/test_tls.py: on one machine"),
    (r"router --discover .*", "tests/cluster/test_fleet.py: a name of several conductors"),
    (r"head -c 16 /dev/urandom \| base64 > secret", AS_WRITTEN),
    (r"conductor (status|trace|drain)( .*)?", AS_WRITTEN),
    (r"conductor --topology deploy/topology/disaggregated\.toml", AS_WRITTEN),
    (r"conductor --worker-listen .* --join-token-file secret .*", "tests/cluster/test_joining.py: on one machine"),
    (r"worker --conductor .* --rank 1 --join-token-file secret .*", "tests/cluster/test_tls.py: on one machine"),
    (r"worker --conductor URL --rank R", "tests/cluster/test_joining.py: with a URL"),
    (r"conductor --workers 8 --device sim", "tests/cluster/test_sim.py: with fewer workers"),
    (r"conductor --workers 2 --otlp-endpoint .*", "tests/cluster/test_tracing.py: with a collector on this machine"),
    (r"conductor --device sim --trace-steps target/steps", AS_WRITTEN),
    (r"tests/tools/draw-steps target/steps\.rank0 > target/steps\.svg", AS_WRITTEN),
    (r"conductor --http .* --tls-cert .*", "tests/cluster/test_tls.py: with certificates"),
    (r"curl https:.*", "tests/cluster/test_tls.py: at a server that exists"),
    (r"cargo run --release --example manuals -- .*", AS_WRITTEN),
    (r"tutti-bench --concurrency 8 --requests 50 --html report.html", AS_WRITTEN),
    (r"tutti-bench .*", "tests/cluster/test_bench.py: at smaller loads"),
    (r"curl -sN? http:.*", AS_WRITTEN),
    (r"cargo run --release --example generate -- .*", AS_WRITTEN),
    (r"python examples/(chat|generate)\.py .*", AS_WRITTEN),
    (r"mkdir -p target/stubs|python -m grpc_tools\.protoc .*|export PYTHONPATH=.*", AS_WRITTEN),
    (r"deploy/wheel/build", "tests/cluster/test_wheel.py: in a debug build"),
    (r"python3 -m venv ~/tutti|~/tutti/bin/pip install \S+|export PATH=~/tutti/bin:\$PATH", "tests/cluster/test_wheel.py: in a temporary folder"),
    (r"cargo install .*", "not run: builds in release mode; every page that names a program runs with it on the PATH"),
    (r"pip install .*", "tests/tools/venv: the same packages, pinned"),
    (r"tests/run", "tests/run: itself"),
    (r"tests/goldens/generate", "tests/run"),
    (r"tests/formats/generate", "tests/run"),
    (r"tests/gpu/bundle", "not run: builds in release mode; tests/run makes the bundle of debug builds"),
    (r"tests/gpu/bundle --debug", "tests/run"),
    (r"emulated-gpu/run .*", "not run: builds in release mode; emulated-gpu/programs runs on the same libraries"),
    (r"tests/tools/nvrtc", "tests/run"),
    (r"conductor kernels( --arch .*)?|conductor --device cuda --compiled-kernels .*", "tests/cluster/test_cuda.py"),
    (r"conductor quantize( .*)?", "tests/cluster/test_quantized_checkpoints.py: with a small model"),
    (r"tests/tools/venv( && tests/goldens/generate)?", "tests/run"),
    (r"tests/(emulated/run|long-properties|mutants|bench/peers/setup)", "not run: takes minutes to hours"),
    (r"tests/advisories", "not run: asks github.com, which not every machine reaches"),
    (r"tests/cuda-orders", "tests/run: one of its orders, half of the tests with checks"),
    (r"tests/cuda-http", "tests/run: a third of the tests, a sixth of their parameters"),
    (r"tests/cuda-mutants", "tests/run: a sample"),
    (r"tests/chaos --minutes 5 --shape mtls", "tests/cluster/test_chaos.py: for half a minute"),
    (r"tests/rolling .*", "tests/cluster/test_rolling.py: one upgrade of each part"),
    (r"tests/(adoption|autoscaling|constraint-cost|fair-shares|media-steps( --draw .*)?|snapshot-cost|tracing-cost)", "not run: they measure, for some minutes"),
    (r"tests/dashboards", "tests/run: without faults"),
    (r"tests/chaos --minutes 30", "tests/cluster/test_chaos.py: for half a minute"),
    (r"tests/families( --models NAME)?", "tests/cluster/test_families.py: some models, some conditions"),
    (r"tests/fuzz( --minutes 10 http template)?", "tests/run: for ten seconds a target"),
    (r"tests/texts/run", "tests/run: with --short, its parts"),
    (r"tests/load-clients", "not run: it fetches 1.5 GB of packages, and takes five minutes"),
    (r"tests/agents", "tests/run: without LiteLLM and Node"),
    (r"tests/memory-comes-back", "not run: it measures, for some minutes, and the router keeps more than it asks for"),
    (r"tests/real-model( --llama-cpp PYTHON)?", "not run: it measures, for a quarter of an hour; `test_gguf.py` asks the same model for five answers"),
    (r"tests/fuzzing/seeds (un)?pack target/seeds( config)?", "tests/fuzz, tests/run: unpacks; packs again"),
    (r"tests/page( pictures)?", "not run: fetches a browser; run it when router/page changes"),
    (r"cargo build (--release )?--bins", "tests/run: in a debug build"),
    (r"tests/hostile --seconds 20", "tests/cluster/test_hostile.py: for three seconds an attack"),
    (r"UPDATE_PAGE=1 cargo test -p tutti-(settings|parameters)", "tests/run: the test that compares the page"),
    (r"UPDATE_GENERATED=1 cargo test -p tutti-proto --test generated", "tests/run: the test that compares the code"),
    (r"(GOLDEN_MODELS=\S+ )?cargo test -p \S+( --test \S+)?( -- (int8 )?--nocapture)?", "tests/run: all tests of the workspace"),
    (r"cargo build --workspace --bins --examples --features tutti/media-test-model", "tests/run"),
    (r"(target/venv/bin/)?pytest tests/cluster/\S+\.py", "tests/run: all of tests/cluster"),
    (r"cargo fmt --all --check", "tests/run"),
    (r"cargo clippy --workspace --all-targets -- -D warnings", "tests/run"),
    (r"cargo bench .*", BENCH),
    (r"python3 -m venv target/tutti-tiny|target/tutti-tiny/bin/.*", "not run: trains the shipped model, an hour or more"),
    (r"kind .*|docker .*|helm (install|test) .*", "not run: there is no container engine; tests/cluster/test_chart.py installs the chart by Helm's library"),
    (r"deploy/docker/build cpu( router)?", "tests/cluster/test_images.py: with a stand-in for Docker"),
    (r"tests/structured-output( --seed 39)?", "tests/cluster/test_structured_output.py: 40 of the schemas"),
    (r"UPDATE_CHART=1 cargo test -p tutti-settings", "tests/run: the test that compares the schema"),
    (r"just check", PEOPLE),
    (r"just t CRATE|tests/crate (CRATE|scheduler)", "not run: tests/run runs the lints and tests of all crates"),
    (r"tests/draw-comments --seed .*", "not run: for people, who judge what it prints"),
    (r"tests/retired-words --wrap", "not run: it changes files"),
    (r"kill -HUP PID", "tests/cluster/test_reload.py"),
    (r"systemctl reload tutti-conductor", "not run: there is no systemd here; tests/cluster/test_images.py reads the unit"),
]


PROGRAMS = r"([A-Z_]+=\S+ )?(cargo|conductor|router|worker|tutti-bench|curl|pip|python3?|pytest|just|(tests|emulated-gpu|deploy|target)/\S+)"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a page. `block` is the number of its block in the page, or None if it stands in backticks."""

    page: Path
    text: str
    block: int | None

    @property
    def entry(self):
        """The entry of COMMANDS for this command, or None."""
        return next((entry for entry in COMMANDS if re.fullmatch(entry[0], self.text)), None)

    @property
    def as_written(self):
        """True if `test_docs.py` runs the command as it is written."""
        return self.block is not None and self.entry is not None and self.entry[1] == AS_WRITTEN


def pages():
    """Returns all pages of the tree."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines()]


def blocks(page):
    """Returns (language, text) of each fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page):
    """Yields the commands in shell blocks, and the commands in backticks that have arguments or are scripts."""
    for number, (language, block) in enumerate(blocks(page)):
        if language not in ("bash", "sh", ""):
            continue
        # A quoted body of several lines belongs to its command.
        block = re.sub(r"'[^']*'", lambda quoted: quoted.group().replace("\n", " "), block.replace("\\\n", " "))
        for line in block.splitlines():
            line = re.sub(r"\s+#\s.*", "", line).strip()
            if re.match(PROGRAMS + r"( |$)", line) or language and line and not line.startswith("#"):
                yield Command(page, line, number)
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for inline in re.findall(r"`([^`\n]+)`", text):
        if re.match(r"([A-Z_]+=\S+ )?(cargo|pytest|just|pip|tests/\S+|conductor|router|worker|tutti-bench) [^=]*\S", inline):
            yield Command(page, inline, None)
