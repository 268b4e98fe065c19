//! The generated code in `src/generated` is what the `.proto` files give. It is committed so that a build needs no
//! compiler of `.proto` files. `UPDATE_GENERATED=1 cargo test -p tutti-proto --test generated` writes it anew.

use std::{env, fs, path::Path};

use prost::Message;

const CLIENT: &str = "tutti/v1/inference.proto";
const CLUSTER: [&str; 6] = [
    "tutti/cluster/v1/conductor.proto",
    "tutti/cluster/v1/worker.proto",
    "tutti/cluster/v1/model.proto",
    "tutti/cluster/v1/transfer.proto",
    "tutti/cluster/v1/lockstep.proto",
    "tutti/cluster/v1/view.proto",
];

#[test]
fn generated_code_is_that_of_the_proto_files() {
    let room = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fresh = tempfile::tempdir().unwrap();
    let all = protox::compile([CLIENT].into_iter().chain(CLUSTER), [room.join("protos")]).unwrap();
    tonic_prost_build::configure().out_dir(fresh.path()).compile_fds(all).unwrap();
    // Reflection shows clients their own API only, not the cluster's internal one.
    let client = protox::compile([CLIENT], [room.join("protos")]).unwrap();
    fs::write(fresh.path().join("tutti.v1.bin"), client.encode_to_vec()).unwrap();

    let committed = room.join("src/generated");
    let update = env::var_os("UPDATE_GENERATED").is_some();
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for name in names(fresh.path()) {
        let wanted = fs::read(fresh.path().join(&name)).unwrap();
        if update {
            fs::write(committed.join(&name), wanted).unwrap();
        } else {
            let found = fs::read(committed.join(&name)).unwrap_or_default();
            assert!(found == wanted, "{name:?} is not current: see the header of this test");
        }
    }
    assert_eq!(names(&committed), names(fresh.path()));
}
