//! Checks that the generated code in `src/generated` and `parameters/src/generated` matches the `.proto` files. The
//! code is committed so that a build needs no compiler of `.proto` files. `UPDATE_GENERATED=1 cargo test -p tutti-proto
//! --test generated` writes the code again.

#![allow(clippy::unwrap_used)] // A failed unwrap is a failed test.

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

/// Messages that the crate `tutti-parameters` defines, with their Rust types.
const PARAMETERS: [(&str, &str); 3] = [
    (".tutti.v1.Sampling", "::tutti_parameters::AskedSampling"),
    (".tutti.cluster.v1.SamplingParams", "::tutti_parameters::SamplingParams"),
    (".tutti.cluster.v1.LogitBias", "::tutti_parameters::LogitBias"),
];

/// The field whose bytes are shared and not copied when a message is cloned: media are large.
const SHARED_BYTES: &str = ".tutti.cluster.v1.MediaItem.data";

#[test]
fn generated_code_is_that_of_the_proto_files() {
    let room = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fresh = tempfile::tempdir().unwrap();
    let all = protox::compile([CLIENT].into_iter().chain(CLUSTER), [room.join("protos")]).unwrap();
    let configure = || tonic_prost_build::configure().bytes(SHARED_BYTES);
    let (mut parameters, mut others) = (configure(), configure());
    for file in &all.file {
        let messages = file.message_type.iter().map(|message| message.name());
        for name in messages.chain(file.enum_type.iter().map(|kind| kind.name())) {
            let path = format!(".{}.{name}", file.package());
            // A message with a path to a type of another crate is not generated in this crate.
            match PARAMETERS.iter().find(|(message, _)| *message == path) {
                Some((_, parameter)) => others = others.extern_path(path, *parameter),
                None => parameters = parameters.extern_path(path, "()"),
            }
        }
    }
    let mut messages = all.clone();
    messages.file.iter_mut().for_each(|file| file.service.clear());
    let folders = [("parameters", "parameters/src/generated"), ("others", "src/generated")];
    let folders = folders.map(|(name, committed)| (fresh.path().join(name), room.join(committed)));
    folders.iter().for_each(|(fresh, _)| fs::create_dir(fresh).unwrap());
    parameters.out_dir(&folders[0].0).compile_fds(messages).unwrap();
    others.out_dir(&folders[1].0).compile_fds(all).unwrap();
    // Clients that use reflection see only their own API, not the cluster's internal one.
    let client = protox::compile([CLIENT], [room.join("protos")]).unwrap();
    fs::write(folders[1].0.join("tutti.v1.bin"), client.encode_to_vec()).unwrap();

    folders.iter().for_each(|(fresh, committed)| compare(fresh, committed));
}

fn compare(fresh: &Path, committed: &Path) {
    let update = env::var_os("UPDATE_GENERATED").is_some();
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for name in names(fresh) {
        let wanted = fs::read(fresh.join(&name)).unwrap();
        if update {
            fs::write(committed.join(&name), wanted).unwrap();
        } else {
            let found = fs::read(committed.join(&name)).unwrap_or_default();
            assert!(found == wanted, "{name:?} is not current: see the header of this test");
        }
    }
    assert_eq!(names(committed), names(fresh));
}
