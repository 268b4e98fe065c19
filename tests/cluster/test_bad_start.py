"""Invalid checkpoints and settings. The executables exit at start with code 64 and one line that names the error."""

import json
import shutil
import socket

import pytest
from harness import CPU_PATHS, GOLDENS, cpu_paths, run_to_exit
from safetensors.numpy import load_file, save_file

SKIP = "--skip-tokenizer-init"


@pytest.fixture
def checkpoint(tmp_path):
    """A valid checkpoint that the test may damage."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDENS / "seed0/qwen3" / file, directory)
    return directory


def refused(tmp_path, *args, env=None, name="conductor"):
    """Runs an executable that must exit with 64 and leave no process. Returns its log."""
    given = [str(arg).split("=")[0] for arg in args]
    free = [f"{flag}=127.0.0.1:0" for flag in ("--http", "--grpc") if flag not in given]
    code, log = run_to_exit(name, [*args, *free], tmp_path, env)
    assert code == 64, f"exit code {code}:\n{log}"
    assert "panicked" not in log
    return log


def config(checkpoint, **changes):
    file = checkpoint / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def tensors(checkpoint, change):
    file = checkpoint / "model.safetensors"
    loaded = load_file(file)
    change(loaded)
    save_file(loaded, file)


class TestCheckpoints:
    def refused(self, tmp_path, checkpoint, *words):
        log = refused(tmp_path, "--workers", 2, "--model", checkpoint, SKIP)
        for word in words:
            assert word in log, f"no {word!r} in:\n{log}"

    @pytest.mark.parametrize("keep", (0, 4, 100, -100))
    def test_truncated_weights(self, tmp_path, checkpoint, keep):
        file = checkpoint / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        self.refused(tmp_path, checkpoint, "model.safetensors")

    def test_a_header_longer_than_the_file(self, tmp_path, checkpoint):
        file = checkpoint / "model.safetensors"
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
        self.refused(tmp_path, checkpoint, "model.safetensors")

    def test_missing_weights(self, tmp_path, checkpoint):
        (checkpoint / "model.safetensors").unlink()
        self.refused(tmp_path, checkpoint, "safetensors")

    def test_a_missing_shard(self, tmp_path, checkpoint):
        names = load_file(checkpoint / "model.safetensors")
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
        where = dict.fromkeys(names, "model-00001-of-00002.safetensors")
        where["model.norm.weight"] = "model-00002-of-00002.safetensors"
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        self.refused(tmp_path, checkpoint, "model-00002-of-00002.safetensors")

    def test_a_shard_outside_the_directory(self, tmp_path, checkpoint):
        names = load_file(checkpoint / "model.safetensors")
        (checkpoint / "model.safetensors").rename(tmp_path / "outside.safetensors")
        index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        self.refused(tmp_path, checkpoint, "../outside.safetensors")

    def test_a_missing_tensor(self, tmp_path, checkpoint):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors(checkpoint, lambda loaded: loaded.pop(name))
        self.refused(tmp_path, checkpoint, name)

    def test_a_misshapen_tensor(self, tmp_path, checkpoint):
        name = "model.layers.2.self_attn.k_proj.weight"

        def transpose(loaded):
            loaded[name] = loaded[name][:-1].copy()

        tensors(checkpoint, transpose)
        self.refused(tmp_path, checkpoint, name, "63", "64")

    def test_a_tensor_of_integers(self, tmp_path, checkpoint):
        name = "model.norm.weight"

        def cast(loaded):
            loaded[name] = loaded[name].astype("int32")

        tensors(checkpoint, cast)
        self.refused(tmp_path, checkpoint, name, "I32")

    def test_an_unknown_architecture(self, tmp_path, checkpoint):
        config(checkpoint, architectures=["UnheardOfForCausalLM"], model_type="unheard_of")
        self.refused(tmp_path, checkpoint, "UnheardOfForCausalLM", "Qwen3ForCausalLM")

    @pytest.mark.parametrize("field", ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"))
    @pytest.mark.parametrize("value", (..., 0, -1, "many", 1e30), ids=("missing", "0", "-1", "text", "huge"))
    def test_a_config_with_an_invalid_value(self, tmp_path, checkpoint, field, value):
        config(checkpoint, **{field: value})
        self.refused(tmp_path, checkpoint, field)

    def test_heads_that_cannot_be_grouped(self, tmp_path, checkpoint):
        config(checkpoint, num_key_value_heads=3)
        self.refused(tmp_path, checkpoint, "num_key_value_heads", "3", "4")

    def test_a_config_that_is_no_json(self, tmp_path, checkpoint):
        (checkpoint / "config.json").write_text("{")
        self.refused(tmp_path, checkpoint, "config.json")

    def test_a_missing_config(self, tmp_path, checkpoint):
        (checkpoint / "config.json").unlink()
        self.refused(tmp_path, checkpoint, "config.json")

    def test_a_missing_tokenizer(self, tmp_path, checkpoint):
        log = refused(tmp_path, "--model", checkpoint)
        assert "tokenizer.json" in log and "skip_tokenizer_init" in log

    def test_a_broken_tokenizer(self, tmp_path, checkpoint):
        (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
        assert "tokenizer.json" in refused(tmp_path, "--model", checkpoint)


class TestSettings:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--workers", "0"], ["workers", "0"]),
            (["--workers=-1"], ["workers", "-1"]),
            (["--workers", "many"], ["workers", "many"]),
            (["--wrokers", "2"], ["wrokers"]),
            (["--max-step-tokens", "0"], ["max_step_tokens", "0"]),
            (["--kv-cache-memory", "1"], ["kv_cache_memory"]),
            (["--chunk-shapes", "64,256"], ["chunk_shapes", "256", "512"]),
            (["--chunk-shapes", "256,64"], ["chunk_shapes", "64 after 256"]),
            (["--http", "nowhere"], ["http", "nowhere"]),
            (["--model", "/no/such/directory"], ["/no/such/directory"]),
            (["--model", "not/a/hub/name"], ["not/a/hub/name"]),
            (["--device", "abacus"], ["abacus"]),
            (["--cpu-isa", "mmx"], ["mmx", "avx512-vnni"]),
            (["--cpu-isa", "avx2", "--device", "sim"], ["cpu_isa", "sim"]),
            (["--config", "/no/such/file.toml"], ["/no/such/file.toml"]),
            (["surplus"], ["surplus"]),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_a_bad_flag(self, tmp_path, args, words):
        log = refused(tmp_path, *args).replace("-", "_") if "_" in "".join(words) else refused(tmp_path, *args)
        for word in words:
            assert word in log, log

    @pytest.mark.parametrize("value", ("TUTTI_WORKERS=many", "TUTTI_WORKERS=0", "TUTTI_WROKERS=2", "TUTTI_CPU_ISA=mmx"))
    def test_a_bad_variable(self, tmp_path, value):
        key, _, text = value.partition("=")
        log = refused(tmp_path, env={key: text})
        assert key.removeprefix("TUTTI_").lower() in log.lower(), log

    @pytest.mark.parametrize("text", ("wrokers = 2\n", "workers = 'many'\n", "workers = 0\n", "workers == 2\n"))
    def test_a_bad_file(self, tmp_path, text):
        file = tmp_path / "tutti.toml"
        file.write_text(text)
        log = refused(tmp_path, "--config", file)
        assert text.split()[0] in log or "tutti.toml" in log, log

    def test_instructions_that_the_machine_lacks(self, tmp_path):
        have = cpu_paths()
        lacking = [path for path in CPU_PATHS if path not in have]
        if not lacking:
            pytest.skip(f"this machine has all paths: {', '.join(have)}")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            # The path is checked before any port is bound, so the error does not mention the port in use.
            http = f"--http=127.0.0.1:{taken.getsockname()[1]}"
            for path in lacking:
                log = refused(tmp_path, "--cpu-isa", path, http)
                assert f"cpu_isa: this machine has no {path} instructions; it has {', '.join(have)}" in log, log

    @pytest.mark.parametrize("setting", ("http", "grpc"))
    @pytest.mark.parametrize("name", ("conductor", "router"))
    def test_a_port_in_use(self, tmp_path, name, setting):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            other = "grpc" if setting == "http" else "http"
            args = [f"--{setting}", address, f"--{other}", "127.0.0.1:0"]
            log = refused(tmp_path, *args, *(["--conductor", "http://127.0.0.1:1"] if name == "router" else []), name=name)
            assert address in log and setting in log, log

    def test_a_router_without_a_conductor(self, tmp_path):
        assert "conductor" in refused(tmp_path, name="router")

    @pytest.mark.parametrize("url", ("nonsense", "ftp://127.0.0.1:1"))
    def test_a_router_with_a_bad_conductor(self, tmp_path, url):
        assert url in refused(tmp_path, "--conductor", url, name="router")
