"""A model that is given by its hub name. It is fetched from a loopback server with the hub's routes."""

import hashlib
import http.server
import json
import pathlib
import re
import threading

import pytest
from harness import GOLDENS, REPO, run_to_exit
from safetensors.numpy import load_file, save_file

TOKEN = "hf_a_secret_of_this_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "acme/small-1"


class Hub(http.server.ThreadingHTTPServer):
    """A server with one private model. It records the requests and their access tokens."""

    def __init__(self, directory):
        super().__init__(("127.0.0.1", 0), Routes)
        self.directory, self.asked = pathlib.Path(directory), []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Routes(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"who are you?")
        if self.path.split("?")[0] in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            files = [{"rfilename": f.name} for f in sorted(self.server.directory.iterdir())]
            return self.answer(200, json.dumps({"sha": COMMIT, "siblings": files}).encode())
        match = re.fullmatch(rf"/{NAME}/resolve/(?:main|{COMMIT})/([\w.-]+)", self.path)
        file = self.server.directory / match[1] if match else None
        if not file or not file.is_file():
            return self.answer(404, b"Entry not found")
        self.answer_file(file.read_bytes())

    do_HEAD = do_GET

    def answer_file(self, data):
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            self.answer(206, data[begin : end + 1], headers)
        else:
            self.answer(200, data, headers)

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    """A server with the golden Qwen3 in two shards, as large models are published."""
    golden, published = GOLDENS / "seed0/qwen3", tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text((golden / "config.json").read_text())
    tensors = load_file(golden / "model.safetensors")
    names, where = sorted(tensors), {}
    for shard in range(2):
        file, part = f"model-{shard + 1:05}-of-00002.safetensors", names[shard::2]
        save_file({name: tensors[name] for name in part}, published / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    server = Hub(published)
    yield server
    server.shutdown()
    server.server_close()


def env(hub, home, token=TOKEN):
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": token}


def test_a_model_by_its_hub_name_is_fetched_once_and_served(start, hub, tmp_path):
    home = tmp_path / "home"
    golden = load_file(GOLDENS / "seed0/qwen3/goldens.safetensors")
    args = ("--workers", 2, "--model", NAME, "--skip-tokenizer-init")
    for run in ("from the hub", "from the cache"):
        cluster = start(*args, env=env(hub, home))
        answer = cluster.complete(
            prompt=golden["t37.input_ids"].tolist(), max_tokens=16, temperature=0, return_token_ids=True
        )
        assert answer["choices"][0]["token_ids"] == golden["t37.greedy"].tolist(), run
        cluster.stop()
        if run == "from the hub":
            fetched = {path for path, _ in hub.asked if path.endswith(".safetensors")}
            assert len(fetched) == 2, hub.asked
            assert {token for _, token in hub.asked} == {f"Bearer {TOKEN}"}
            assert any(home.rglob(f"snapshots/{COMMIT}/config.json")), "the cache is not where other tools look for it"
            hub.asked.clear()
    assert not [path for path, _ in hub.asked if path.endswith(".safetensors")], "weights were fetched again"


def test_a_gguf_file_by_its_hub_name_is_fetched_once_and_served(start, hub, tmp_path):
    source = REPO / "target/formats/goldens-gguf/qwen3-q8_0"
    golden = load_file(source / "goldens.safetensors")
    (hub.directory / "Small-Q8_0.gguf").write_bytes((source / "model.gguf").read_bytes())
    home, name = tmp_path / "home", f"{NAME}/Small-Q8_0.gguf"
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        cluster = start("--workers", 1, "--model", name, "--skip-tokenizer-init", env=env(hub, home) | offline)
        assert cluster.model == name
        answer = cluster.complete(
            prompt=golden["t37.input_ids"].tolist(), max_tokens=16, temperature=0, return_token_ids=True
        )
        assert answer["choices"][0]["token_ids"] == golden["t37.greedy"].tolist(), offline
        cluster.stop()
    assert {path.rpartition("/")[2] for path, _ in hub.asked if "/resolve/" in path} == {"Small-Q8_0.gguf"}
    missing = f"{NAME}/Small-Q4_K_M.gguf"
    code, log = run_to_exit("conductor", ["--model", missing], tmp_path, env(hub, home))
    assert code == 64 and "no file Small-Q4_K_M.gguf; its GGUF files: Small-Q8_0.gguf" in log, log


def test_an_unknown_hub_name_is_bad_usage(hub, tmp_path):
    code, log = run_to_exit("conductor", ["--model", "acme/nothing"], tmp_path, env(hub, tmp_path / "home"))
    assert code == 64 and "acme/nothing" in log, log


def test_a_refused_token_is_reported(hub, tmp_path):
    code, log = run_to_exit("conductor", ["--model", NAME], tmp_path, env(hub, tmp_path / "home", "hf_wrong"))
    assert code == 64 and NAME in log and "401" in log, log
    assert "hf_wrong" not in log, "a token must not be logged"
