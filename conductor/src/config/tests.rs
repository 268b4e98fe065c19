//! Every layer of the settings takes effect, and settings that cannot serve are refused by name.

use std::{ffi::OsString, io::Write};

use tutti_runtime::{
    command_line::{self, CommandLine},
    config,
};
use tutti_settings::{ByteSize, ClusterAddress};

use super::*;

fn command_line(arguments: &[&str]) -> Result<CommandLine, clap::Error> {
    let arguments = ["conductor"].iter().chain(arguments).map(OsString::from);
    command_line::parse::<ConductorSettings>(command_line::processes::CONDUCTOR, arguments)
}

fn load(arguments: &[&str]) -> Result<ConductorSettings, Error> {
    let CommandLine { config, settings, .. } = command_line(arguments).unwrap();
    let settings = config::layered(config.as_deref(), &settings)?;
    validate(&settings)?;
    Ok(settings)
}

#[test]
fn no_flags_give_the_documented_defaults() {
    let config = load(&[]).unwrap();
    assert_eq!(config, ConductorSettings::default());
    assert_eq!(
        (config.workers(), config.addresses.http.port(), config.addresses.grpc.port()),
        (1, 8000, 50051)
    );
}

#[test]
fn flags_reach_their_settings() {
    let config = load(&[
        "--workers=2",
        "--device=cpu",
        "--skip-tokenizer-init",
        "--no-router",
        "--kv-cache-memory=512MiB",
        "--worker-listen=unix:/tmp/x",
        "--load-format=dummy",
        "--quantize=int8",
        "--cpu-isa=avx512-vnni",
        "--drain-timeout=5",
    ])
    .unwrap();
    assert_eq!((config.workers(), config.device.device), (2, DeviceChoice::Cpu));
    assert!(config.router.skip_tokenizer_init && config.membership.no_router);
    assert_eq!(config.engine.kv_cache_memory, Some(ByteSize(512 << 20)));
    assert_eq!(config.membership.worker_listen, Some(ClusterAddress::Unix("/tmp/x".into())));
    assert_eq!((config.weights.quantize, config.device.cpu_isa), (Quantize::Int8, CpuIsa::Avx512Vnni));
    assert_eq!((config.weights.load_format, config.drain.drain_timeout), (LoadFormat::Dummy, 5));
}

#[test]
fn tp_alone_starts_the_workers_of_one_replica() {
    let config = load(&["--tp=2"]).unwrap();
    assert_eq!(layout(&config).unwrap().topology.spawned_workers(), 2);
    let config = load(&["--tp=2", "--workers=4"]).unwrap();
    assert_eq!(layout(&config).unwrap().topology.spawned_workers(), 4);
    assert_eq!(load(&["--tp=2", "--workers=3"]).unwrap_err().field(), Some("tp"));
}

#[test]
fn settings_that_cannot_serve_are_refused_by_name() {
    for (flag, field) in [
        ("--workers=0", "workers"),
        ("--workers=257", "workers"),
        ("--tp=0", "tp"),
        ("--tp=257", "tp"),
        ("--ep", "ep"),
        ("--topology=/no/such/file.toml", "topology"),
        ("--transfer-timeout=0", "transfer_timeout"),
        ("--collective-timeout=0", "collective_timeout"),
        ("--max-step-tokens=0", "max_step_tokens"),
        ("--max-prefill-chunk-size=0", "max_prefill_chunk_size"),
        ("--chunk-shapes=64,256", "chunk_shapes"),
        ("--long-prefill-token-threshold=0", "long_prefill_token_threshold"),
        ("--target-itl-ms=0", "target_itl_ms"),
        ("--max-running-requests=0", "max_running_requests"),
        ("--max-model-len=0", "max_model_len"),
        ("--max-replays=101", "max_replays"),
        ("--heartbeat-timeout=1", "heartbeat_timeout"),
        ("--hang-timeout=0", "hang_timeout"),
        ("--threads=0", "threads"),
        ("--kv-cache-memory=0", "kv_cache_memory"),
        ("--served-model-name=", "served_model_name"),
        ("--served-model-name=a,,b", "served_model_name"),
        ("--grpc=127.0.0.1:8000", "grpc"),
        ("--grpc=0.0.0.0:8000", "grpc"),
        ("--worker-listen=127.0.0.1:50051", "worker_listen"),
        ("--cluster-grpc=127.0.0.1:50052", "cluster_token_file"),
        ("--cluster-grpc=unix:/tmp/x", "cluster_token_file"),
        ("--trace-steps=/no/such/directory/steps", "trace_steps"),
        ("--packed-weights=/no/such/directory", "packed_weights"),
    ] {
        let error = load(&[flag]).unwrap_err();
        assert_eq!(error.field(), Some(field), "{flag}: {error}");
    }
    let error = load(&["--no-quantized-activations", "--quantize=int8"]).unwrap_err();
    assert_eq!(error.field(), Some("no_quantized_activations"), "{error}");
    assert!(load(&["--no-quantized-activations"]).is_ok(), "a checkpoint may have weights of four bits");
}

#[test]
fn a_device_of_a_later_build_is_refused_with_what_there_is() {
    let error = command_line(&["--device=tpu"]).unwrap_err().to_string();
    assert!(error.contains("tpu") && error.contains("auto, cpu, cuda, sim"), "{error}");
}

#[test]
fn fixed_shapes_are_given_as_a_list_and_refused_by_name_with_the_limit() {
    let config = load(&["--chunk-shapes=64,256,512"]).unwrap();
    assert_eq!(config.engine.chunk_shapes.unwrap().to_string(), "64,256,512");
    assert!(load(&["--chunk-shapes=8", "--max-step-tokens=8"]).is_ok());
    let error = load(&["--chunk-shapes=64,256"]).unwrap_err().to_string();
    assert!(
        error.contains("no shape above 256") && error.contains("512 tokens (max_step_tokens)"),
        "{error}"
    );
    for (shapes, why) in
        [("", "no shape"), ("0,512", "0 tokens"), ("512,64", "64 after 512"), ("512,512", "512 after 512")]
    {
        let error = command_line(&[&format!("--chunk-shapes={shapes}")]).unwrap_err().to_string();
        assert!(error.contains("--chunk-shapes") && error.contains(why), "{error}");
    }
}

#[test]
fn a_simulated_device_quantises_nothing() {
    assert!(load(&["--quantize=int8", "--device=cpu"]).is_ok());
    let error = load(&["--quantize=int8", "--device=sim"]).unwrap_err();
    assert_eq!(error.field(), Some("quantize"), "{error}");
    assert!(load(&["--kv-cache-dtype=fp8", "--device=cpu"]).is_ok());
    let error = load(&["--kv-cache-dtype=fp8", "--device=sim"]).unwrap_err();
    assert_eq!(error.field(), Some("kv_cache_dtype"), "{error}");
    for other in ["--device=sim", "--load-format=dummy"] {
        let error = load(&["--packed-weights=/tmp", other]).unwrap_err();
        assert_eq!(error.field(), Some("packed_weights"), "{error}");
    }
    let error = command_line(&["--quantize=int3"]).unwrap_err().to_string();
    assert!(error.contains("int3") && error.contains("none, int8, int4"), "{error}");
}

#[test]
fn a_simulated_device_has_no_instruction_path() {
    assert!(load(&["--cpu-isa=avx2", "--device=cpu"]).is_ok());
    assert!(load(&["--cpu-isa=auto", "--device=sim"]).is_ok());
    let error = load(&["--cpu-isa=avx2", "--device=sim"]).unwrap_err();
    assert_eq!(error.field(), Some("cpu_isa"), "{error}");
}

#[test]
fn an_unknown_instruction_path_is_refused_with_those_there_are() {
    let error = command_line(&["--cpu-isa=mmx"]).unwrap_err().to_string();
    let there = "auto, portable, avx2, avx512, avx512-vnni, avx512-bf16";
    assert!(error.contains("mmx") && error.contains(there), "{error}");
}

#[test]
fn a_topology_file_says_how_many_workers_there_are() {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(b"[[group]]\nname = 'all'\nranks = 3\n").unwrap();
    let topology = format!("--topology={}", file.path().display());
    let config = load(&[&topology, "--device=sim"]).unwrap();
    let layout = layout(&config).unwrap();
    assert_eq!((layout.topology.spawned_workers(), layout.devices), (3, vec![DeviceChoice::Sim]));
    assert_eq!(load(&[&topology, "--workers=2"]).unwrap_err().field(), Some("workers"));
}

#[test]
fn routers_and_workers_have_an_address_each() {
    let token = "--cluster-token-file=/tmp/token";
    assert!(load(&["--cluster-grpc=127.0.0.1:50052", token]).is_ok());
    for workers in ["--worker-listen=0.0.0.0:50052", "--worker-listen=127.0.0.1:50052"] {
        let error = load(&["--cluster-grpc=127.0.0.1:50052", token, workers]).unwrap_err();
        assert_eq!(error.field(), Some("cluster_grpc"));
    }
    let both = load(&["--cluster-grpc=unix:/tmp/x", token, "--worker-listen=unix:/tmp/x"]);
    assert_eq!(both.unwrap_err().field(), Some("cluster_grpc"));
    let both = load(&["--cluster-grpc=127.0.0.1:50051", token]);
    assert_eq!(both.unwrap_err().field(), Some("cluster_grpc"));
}

#[test]
fn two_free_ports_do_not_clash() {
    assert!(load(&["--http=127.0.0.1:0", "--grpc=127.0.0.1:0"]).is_ok());
}

#[test]
fn the_printed_config_is_a_config() {
    let config = load(&[
        "--workers=3",
        "--quantize=int8",
        "--cpu-isa=avx512",
        "--kv-cache-memory=2GB",
        "--worker-listen=0.0.0.0:7000",
    ])
    .unwrap();
    let printed = config::print(&config).unwrap();
    assert_eq!(serde_json::from_str::<ConductorSettings>(&printed).unwrap(), config);
}
