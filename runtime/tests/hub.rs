//! Checkpoints from a hub, tested against a loopback server with the hub's routes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test, in the loopback hub too")]

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, Response, StatusCode, Uri, header},
};
use tutti_runtime::{
    ErrorKind,
    checkpoint::{Checkpoint, HubOptions, ModelSource, Wanted, resolve},
    progress::LoadDisplay,
};

const ID: &str = "some-org/Some-Model";
const TOKEN: &str = "hf_test";

/// A hub with one model. It refuses requests without [`TOKEN`].
struct Hub {
    /// File contents by name, in the current commit of main.
    files: BTreeMap<String, Vec<u8>>,
    commit: &'static str,
    /// Names of the files whose contents were requested.
    fetched: Vec<String>,
}

type Shared = Arc<Mutex<Hub>>;

/// Starts the hub. Returns its address and its state.
async fn start(files: &[(&str, &[u8])]) -> (String, Shared) {
    let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
    let hub = Arc::new(Mutex::new(Hub { files, commit: "c0ffee1", fetched: Vec::new() }));
    let app = Router::new().fallback(answer).with_state(Arc::clone(&hub));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (endpoint, hub)
}

async fn answer(State(hub): State<Shared>, uri: Uri, headers: HeaderMap) -> Response<Body> {
    let status = |status: StatusCode| Response::builder().status(status).body(Body::empty()).unwrap();
    let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if sent != Some(&format!("Bearer {TOKEN}")) {
        return status(StatusCode::UNAUTHORIZED);
    }
    let mut hub = hub.lock().unwrap();
    if uri.path() == format!("/api/models/{ID}/revision/main") {
        let siblings: Vec<_> = hub.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"id": ID, "sha": hub.commit, "siblings": siblings});
        return Response::builder().body(Body::from(info.to_string())).unwrap();
    }
    let commit = hub.commit;
    let Some(name) = uri.path().strip_prefix(&format!("/{ID}/resolve/{commit}/")).map(str::to_owned) else {
        return status(StatusCode::NOT_FOUND);
    };
    let Some(contents) = hub.files.get(&name).cloned() else {
        return status(StatusCode::NOT_FOUND);
    };
    let range = headers[header::RANGE].to_str().unwrap().strip_prefix("bytes=").unwrap();
    let (first, last) = range.split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let last = last.min(contents.len() - 1);
    if (first, last) != (0, 0) {
        hub.fetched.push(name.clone());
    }
    Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header(header::ETAG, format!("\"{commit}-{name}\""))
        .header("x-repo-commit", commit)
        .header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{}", contents.len()))
        .body(Body::from(contents[first..=last].to_vec()))
        .unwrap()
}

fn options(endpoint: &str, cache: &Path) -> HubOptions {
    let (endpoint, token) = (Some(endpoint.to_owned()), Some(TOKEN.to_owned()));
    HubOptions { endpoint, token, cache: cache.join("hub"), offline: false }
}

async fn get(options: &HubOptions, wanted: Wanted) -> Result<Checkpoint, tutti_runtime::Error> {
    let source = ModelSource::parse(Some(ID))?;
    resolve(&source, wanted, options, &LoadDisplay::new(false), &|_| Ok(())).await
}

fn files_of(checkpoint: &Checkpoint) -> HashSet<String> {
    let entries = fs::read_dir(&checkpoint.dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

const INDEX: &[u8] =
    br#"{"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

#[tokio::test]
async fn a_sharded_model_is_downloaded_once_and_whole() {
    // This file is larger than the parts in which hf-hub requests a file.
    let large: Vec<u8> = (0..10_500_000u32).map(|i| (i % 251) as u8).collect();
    let (endpoint, hub) = start(&[
        ("README.md", b"read me"),
        ("chat_template.jinja", b"{{ x }}"),
        ("config.json", b"{}"),
        ("model-1.safetensors", &large),
        ("model-2.safetensors", b"two"),
        ("model.safetensors.index.json", INDEX),
        ("original/model.safetensors", b"not this one"),
        ("tokenizer.json", b"{\"t\": 1}"),
    ])
    .await;
    let home = tempfile::tempdir().unwrap();
    let options = options(&endpoint, home.path());

    let checkpoint = get(&options, Wanted::Everything).await.unwrap();
    assert_eq!(checkpoint.name, ID);
    assert!(
        checkpoint.dir.starts_with(home.path().join("hub/models--some-org--Some-Model/snapshots/c0ffee1"))
    );
    assert_eq!(fs::read(checkpoint.dir.join("model-1.safetensors")).unwrap(), large);
    let expected = [
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(files_of(&checkpoint), expected.map(str::to_owned).into());

    hub.lock().unwrap().fetched.clear();
    assert_eq!(get(&options, Wanted::Everything).await.unwrap(), checkpoint);
    assert_eq!(hub.lock().unwrap().fetched, [""; 0]);
}

#[tokio::test]
async fn weights_that_are_not_wanted_are_not_downloaded() {
    let (endpoint, hub) = start(&[("config.json", b"{}"), ("model.safetensors", b"weights")]).await;
    let home = tempfile::tempdir().unwrap();
    let checkpoint = get(&options(&endpoint, home.path()), Wanted::NoWeights).await.unwrap();
    assert_eq!(files_of(&checkpoint), ["config.json".to_owned()].into());
    assert_eq!(hub.lock().unwrap().fetched, ["config.json"]);
}

#[tokio::test]
async fn a_branch_that_moved_is_followed_whole() {
    let (endpoint, hub) = start(&[("config.json", b"{}"), ("model.safetensors", b"old")]).await;
    let home = tempfile::tempdir().unwrap();
    let options = options(&endpoint, home.path());
    get(&options, Wanted::Everything).await.unwrap();
    {
        let mut hub = hub.lock().unwrap();
        hub.commit = "decade2";
        hub.files.insert("model.safetensors".into(), b"new".to_vec());
    }
    let checkpoint = get(&options, Wanted::Everything).await.unwrap();
    assert_eq!(fs::read(checkpoint.dir.join("model.safetensors")).unwrap(), b"new");
    assert_eq!(fs::read(checkpoint.dir.join("config.json")).unwrap(), b"{}");
}

#[tokio::test]
async fn what_is_cached_is_served_without_a_hub() {
    let (endpoint, _hub) = start(&[("config.json", b"{}"), ("model.safetensors", b"weights")]).await;
    let home = tempfile::tempdir().unwrap();
    let online = options(&endpoint, home.path());
    let offline = HubOptions { offline: true, ..online.clone() };
    let nowhere = HubOptions { endpoint: Some("http://127.0.0.1:1".into()), ..online.clone() };

    let error = get(&offline, Wanted::Everything).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("HF_HUB_OFFLINE"), "{error}");
    let error = get(&nowhere, Wanted::Everything).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("http://127.0.0.1:1") && error.message().contains(ID), "{error}");

    // A cached commit without weights is complete only if no weights are wanted.
    let partial = get(&online, Wanted::NoWeights).await.unwrap();
    assert_eq!(get(&offline, Wanted::NoWeights).await.unwrap(), partial);
    get(&offline, Wanted::Everything).await.unwrap_err();

    let checkpoint = get(&online, Wanted::Everything).await.unwrap();
    assert_eq!(get(&offline, Wanted::Everything).await.unwrap(), checkpoint);
    assert_eq!(get(&nowhere, Wanted::Everything).await.unwrap(), checkpoint);
}

#[tokio::test]
async fn a_missing_or_wrong_token_says_so() {
    let (endpoint, _hub) = start(&[("config.json", b"{}")]).await;
    let home = tempfile::tempdir().unwrap();
    for (token, hint) in [(None, "no token was sent"), (Some("hf_other".to_owned()), "check HF_TOKEN")] {
        let options = HubOptions { token, ..options(&endpoint, home.path()) };
        let error = get(&options, Wanted::Everything).await.unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("model")));
        for part in [ID, &endpoint, "401", hint] {
            assert!(error.message().contains(part), "{part} in {error}");
        }
        assert!(!error.message().contains("hf_other"), "{error}");
    }
}

#[tokio::test]
async fn an_unknown_model_and_one_without_safetensors_are_refused() {
    let (endpoint, _hub) = start(&[("config.json", b"{}"), ("pytorch_model.bin", b"pickle")]).await;
    let home = tempfile::tempdir().unwrap();
    let options = options(&endpoint, home.path());
    let source = ModelSource::parse(Some("some-org/Other-Model")).unwrap();
    let error = resolve(&source, Wanted::Everything, &options, &LoadDisplay::new(false), &|_| Ok(()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("404") && error.message().contains(&endpoint), "{error}");

    let error = get(&options, Wanted::Everything).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("no safetensors weights"), "{error}");
}

#[tokio::test]
async fn the_config_is_checked_before_weights_are_downloaded() {
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.safetensors", b"weights"), ("tokenizer.json", b"{}")];
    let (endpoint, hub) = start(&files).await;
    let home = tempfile::tempdir().unwrap();
    let check = |dir: &Path| {
        assert!(dir.join("config.json").is_file());
        Err(tutti_runtime::Error::invalid("model", "of another family"))
    };
    let source = ModelSource::parse(Some(ID)).unwrap();
    let options = options(&endpoint, home.path());
    let error =
        resolve(&source, Wanted::Everything, &options, &LoadDisplay::new(false), &check).await.unwrap_err();
    assert_eq!(error.message(), "of another family");
    assert!(!hub.lock().unwrap().fetched.contains(&"model.safetensors".to_owned()));
}

#[tokio::test]
async fn weights_of_other_formats_on_a_hub_are_named() {
    let (endpoint, _) = start(&[("config.json", b"{}"), ("pytorch_model.bin", b"weights")]).await;
    let home = tempfile::tempdir().unwrap();
    let error = get(&options(&endpoint, home.path()), Wanted::Everything).await.unwrap_err();
    assert!(
        error.message().contains("pytorch_model.bin") && error.message().contains("save_pretrained"),
        "{error}"
    );
}
