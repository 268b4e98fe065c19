"""The container images, without a container engine. Tests that their root file systems serve an unprivileged user
without write access, and that the systemd units match our executables' flags."""

import json
import pathlib
import platform
import re
import shlex
import subprocess

import pytest
from harness import BINARIES, REPO, Server, free_port

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the images are for x86-64")

IMAGES = REPO / "target/images"
DOCKERFILE = (REPO / "deploy/docker/Dockerfile").read_text()
USER = "65532"


@pytest.fixture(scope="module")
def bubblewrap():
    """Returns the command that starts bubblewrap, a sandbox, from Debian's packages and with their libraries."""
    root = IMAGES / "bubblewrap"
    subprocess.run([REPO / "tests/tools/fetch-debian", root, "bookworm", "bubblewrap"], check=True)
    libraries = root / "lib/x86_64-linux-gnu"
    return [libraries / "ld-linux-x86-64.so.2", "--library-path", f"{libraries}:{root}/usr/lib/x86_64-linux-gnu", root / "usr/bin/bwrap"]


def assembled(part):
    """Assembles the root file system of an image, and returns its path."""
    root = IMAGES / part
    subprocess.run([REPO / "deploy/docker/assemble", part, root, BINARIES], check=True)
    return root


@pytest.fixture(scope="module")
def cpu():
    return assembled("cpu")


@pytest.fixture(scope="module")
def router():
    return assembled("router")


def stage(part):
    """Returns {instruction: text} of an image's last stage."""
    text = DOCKERFILE.split(f"FROM scratch AS {part}\n")[1].split("\nFROM ")[0].replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        found[name] = f"{found.get(name, '')} {rest}".strip()
    return found


def sandbox(bubblewrap, root, part, **variables):
    """Returns a command that runs an executable of the image as in a pod: as the image's user, without capabilities, on
    a read-only root."""
    instructions = stage(part)
    assert instructions["USER"] == f"{USER}:{USER}" and instructions["STOPSIGNAL"] == "SIGTERM"
    environment = dict(word.split("=", 1) for word in shlex.split(instructions["ENV"])) | variables
    command = [
        *bubblewrap, "--unshare-user", "--uid", USER, "--gid", USER, "--cap-drop", "ALL", "--ro-bind", root, "/",
        "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/home/tutti", "--die-with-parent",
    ]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    return [str(word) for word in command]


def entrypoint(part):
    """Returns a command in which the image's shell runs the image's entry point. The shell drops the executable's path,
    which `Process` adds."""
    (program,) = json.loads(stage(part)["ENTRYPOINT"])
    return ["/bin/sh", "-c", f'shift; exec {program} "$@"', "sh"]


def signal_inside(process, name):
    """Stops the process of this name inside the sandbox, as a container engine would."""
    (pid,) = [pid for pid, found in process.processes().items() if found == name]
    subprocess.run(["kill", "-TERM", str(pid)], check=True)


def health(bubblewrap, root, part, port):
    """Returns the exit status of the image's own health check, with this port."""
    check = stage(part)["HEALTHCHECK"].split(" CMD ")[1].replace(":9090", f":{port}")
    return subprocess.run([*sandbox(bubblewrap, root, part), *json.loads(check)], capture_output=True).returncode


def test_the_images_serve_an_unprivileged_user_on_a_root_that_cannot_be_written(bubblewrap, cpu, router, tmp_path):
    probes = free_port()
    under = sandbox(bubblewrap, cpu, "cpu", TUTTI_OPERATIONS=f"127.0.0.1:{probes}")
    assert health(bubblewrap, cpu, "cpu", probes) != 0
    token = tmp_path / "cluster-token"
    shared = ["--ro-bind", str(tmp_path), "/etc/tutti"]
    cluster = ["--cluster-grpc", f"127.0.0.1:{free_port()}", "--cluster-token-file", "/etc/tutti/cluster-token"]
    conductor = Server("conductor", ["--workers", "1", *cluster], tmp_path, under=[*under, *shared, *entrypoint("cpu")])
    try:
        conductor.wait_until_ready()
        assert token.exists() and health(bubblewrap, cpu, "cpu", probes) == 0
        assert conductor.chat(messages=[{"role": "user", "content": "What is Tutti?"}], max_tokens=8)["choices"]
        # Each process of the container runs as the image's user, and may write only to volumes.
        for pid in conductor.workers():
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
            assert re.search(r"^CapEff:\s*0+$", status, re.M) and re.search(r"^NoNewPrivs:\s*1$", status, re.M)
        written = "touch /tmp/a /home/tutti/a && ! touch /usr/bin/a 2>/dev/null && ! touch /a 2>/dev/null && id -u"
        done = subprocess.run([*sandbox(bubblewrap, cpu, "cpu"), "/bin/sh", "-c", written], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, USER), done.stderr

        under = sandbox(bubblewrap, router, "router", TUTTI_OPERATIONS=f"127.0.0.1:{free_port()}")
        args = ["--conductor", f"http://{cluster[1]}", "--cluster-token-file", "/etc/tutti/cluster-token"]
        front = Server("router", args, tmp_path, under=[*under, *shared, *entrypoint("router")])
        try:
            front.wait_until_ready()
            assert front.chat(messages=[{"role": "user", "content": "What is Tutti?"}], max_tokens=8)["choices"]
            signal_inside(front, "router")
            assert front.wait() == 0, front.explain("did not drain")
        finally:
            front.destroy()
        signal_inside(conductor, "conductor")
        assert conductor.wait() == 0, conductor.explain("did not drain")
        conductor.wait_until_all_gone()
    finally:
        conductor.destroy()


def test_a_worker_of_the_image_starts(bubblewrap, cpu):
    done = subprocess.run([*sandbox(bubblewrap, cpu, "cpu"), "worker", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("worker"), done.stderr


def test_images_hold_their_own_executables_and_nothing_with_more_rights(cpu, router):
    programs = ("conductor", "router", "worker")
    assert [(cpu / "usr/bin" / name).exists() for name in programs] == [True, False, True]
    assert [(router / "usr/bin" / name).exists() for name in programs] == [False, True, False]
    for root in (cpu, router):
        assert (root / "etc/passwd").read_text() == f"tutti:x:{USER}:{USER}:Tutti:/home/tutti:/bin/false\n"
        certificates = (root / "etc/ssl/certs/ca-certificates.crt").read_text()
        assert certificates.count("BEGIN CERTIFICATE") > 50
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert not path.stat().st_mode & 0o6000, path
                assert not path.stat().st_mode & 0o002, path


def test_the_image_for_gpus_has_the_libraries_that_a_worker_loads(tmp_path):
    """Uses empty files in place of NVIDIA's libraries, because only names and links are copied."""
    libraries = tmp_path / "usr/local/cuda/lib64"
    libraries.mkdir(parents=True)
    names = ["libnvrtc.so.13.0.1", "libnvrtc-builtins.so.13.0.1", "libcublasLt.so.13.0.1", "libnccl.so.2.28.3"]
    for name in names:
        (libraries / name).write_text(name)
        (libraries / ".".join(name.split(".")[:3])).symlink_to(name)
    assemble = [REPO / "deploy/docker/assemble", "cuda", tmp_path / "root", BINARIES, tmp_path / "usr"]
    subprocess.run(assemble, check=True)
    root = tmp_path / "root"
    (folder,) = re.findall(r"LD_LIBRARY_PATH=(\S+)", stage("cuda")["ENV"])
    for name in ("libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"):
        assert (root / folder.lstrip("/") / name).read_text().startswith(name)
    # The image must not have the driver's library, because the node provides it.
    assert not list(root.rglob("libcuda.so*"))
    (libraries / names[3]).unlink()
    (libraries / "libnccl.so.2").unlink()
    refused = subprocess.run(assemble, capture_output=True, text=True)
    assert refused.returncode != 0 and "no libnccl.so.2" in refused.stderr


def test_each_image_is_described():
    for part in ("router", "cpu", "cuda"):
        instructions = stage(part)
        for label in ("title", "description", "licenses", "version", "revision"):
            assert f"org.opencontainers.image.{label}=" in instructions["LABEL"]
        assert instructions["HEALTHCHECK"] and instructions["EXPOSE"] == "8000 50051 9090"
    # The only base images are those that the script passes by digest.
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    names = set(re.findall(r" AS (\S+)", DOCKERFILE))
    assert {base for base in bases if base not in names} == {"${RUST_IMAGE}", "${DEBIAN_IMAGE}", "${CUDA_IMAGE}", "scratch"}


def test_the_script_builds_from_digests_alone(tmp_path):
    """Uses a script in place of docker. It prints the same digest for every tag."""
    digest = "sha256:" + "a" * 64
    (tmp_path / "docker").write_text(f'#!/bin/sh\ncase "$*" in *imagetools*) echo {digest};; *) echo "$@" >>"{tmp_path}/calls";; esac\n')
    (tmp_path / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run([REPO / "deploy/docker/build", "router", "cpu"], env=env, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    for call in calls:
        assert re.search(rf"RUST_IMAGE=rust:[\d.]+-bookworm@{digest}", call)
        assert f"DEBIAN_IMAGE=debian:bookworm-slim@{digest}" in call
    refused = subprocess.run([REPO / "deploy/docker/build", "cuda"], env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "CUDA_IMAGE" in refused.stderr


def test_the_bill_of_materials_names_linked_crates_and_packages(cpu):
    printed = subprocess.check_output([REPO / "deploy/docker/sbom", "cpu", cpu / "usr/share/tutti/packages"])
    bill = json.loads(printed)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    names = {component["name"] for component in bill["components"]}
    assert {"tutti-conductor", "tutti-worker", "tokio", "rustls", "libc6", "curl"} <= names
    # Crates that are only used by tests are not linked.
    assert "proptest" not in names and "loom" not in names
    purls = [component["purl"] for component in bill["components"]]
    assert len(purls) == len(set(purls)) and all(purl.startswith("pkg:") for purl in purls)


@pytest.mark.parametrize("name", ["conductor", "router"])
def test_a_systemd_unit_starts_what_its_executable_takes(name, tmp_path):
    """Tests the unit's command line, with our example of a settings file, and the unit's time to stop."""
    unit = (REPO / f"deploy/systemd/tutti-{name}.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    words = shlex.split(start.replace(f"/etc/tutti/{name}.toml", str(REPO / f"deploy/{name}.toml")))
    assert words[0] == f"/usr/bin/{name}"
    environment = dict(word.split("=", 1) for line in re.findall(r"^Environment=(.*)$", unit, re.M) for word in line.split())
    printed = subprocess.run([BINARIES / name, *words[1:], "--print-config"], env=environment, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    config = json.loads(printed.stdout)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(stop) >= config["drain_timeout"] + config["lame_duck"] + 5
    # Workers outlive a conductor that is killed.
    kill_mode = {"conductor": "process", "router": "mixed"}[name]
    for line in (f"KillMode={kill_mode}", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=", "User=tutti", r"ExecReload=/bin/kill -HUP \$MAINPID"):
        assert re.search(f"^{line}$", unit, re.M), line
    if name == "conductor":
        (directory,) = re.findall(r"^RuntimeDirectory=(.*)$", unit, re.M)
        assert config["state_directory"] == f"/run/{directory}"
        assert re.search("^RuntimeDirectoryMode=0700$", unit, re.M) and re.search("^RuntimeDirectoryPreserve=restart$", unit, re.M)
