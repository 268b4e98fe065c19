//! Compiles the .proto files in pure Rust, so that no system `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const CLIENT: &str = "tutti/v1/inference.proto";
const CLUSTER: [&str; 5] = [
    "tutti/cluster/v1/conductor.proto",
    "tutti/cluster/v1/worker.proto",
    "tutti/cluster/v1/model.proto",
    "tutti/cluster/v1/transfer.proto",
    "tutti/cluster/v1/lockstep.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=protos");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let all = protox::compile([CLIENT].into_iter().chain(CLUSTER), ["protos"])?;
    tonic_prost_build::configure().compile_fds(all)?;
    // Reflection shows clients their own API only, not the cluster's internal one.
    let client = protox::compile([CLIENT], ["protos"])?;
    fs::write(out.join("tutti.v1.bin"), client.encode_to_vec())?;
    Ok(())
}
