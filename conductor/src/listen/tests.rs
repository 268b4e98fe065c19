use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt};

use super::*;

async fn bind_workers(address: Option<&ClusterAddress>) -> Result<ClusterListener, Error> {
    ClusterListener::bind(Callers::Workers, address, None, &ClusterTransport::default()).await
}

/// Transport rules that allow plaintext between machines.
fn allowing() -> ClusterTransport {
    let settings = tutti_settings::ClusterTlsSettings { insecure_plaintext: true, ..Default::default() };
    ClusterTransport::read(&settings).unwrap()
}

#[tokio::test]
async fn a_dead_conductors_socket_is_replaced_and_a_live_ones_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let address = ClusterAddress::Unix(directory.path().join("socket"));
    let first = bind_workers(Some(&address)).await.unwrap();
    let error = bind_workers(Some(&address)).await.unwrap_err();
    assert_eq!(error.field(), Some("worker_listen"));
    drop(first);
    assert!(bind_workers(Some(&address)).await.is_ok());
}

#[tokio::test]
async fn a_file_that_is_no_socket_is_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let (file, link, stale) =
        (directory.path().join("file"), directory.path().join("link"), directory.path().join("stale"));
    fs::write(&file, "a year of work").unwrap();
    // `bind` does not remove a symbolic link to a dead socket either.
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    std::os::unix::fs::symlink(&stale, &link).unwrap();
    for path in [&file, &link] {
        for callers in [Callers::Workers, Callers::Routers] {
            let address = ClusterAddress::Unix(path.clone());
            let error = ClusterListener::bind(callers, Some(&address), None, &ClusterTransport::default())
                .await
                .unwrap_err();
            assert_eq!(error.field(), Some(callers.field()));
        }
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "a year of work");
    assert!(link.is_symlink());
}

#[tokio::test]
async fn only_this_user_can_connect_to_a_socket_at_a_given_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = bind_workers(Some(&ClusterAddress::Unix(path.clone()))).await.unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert!(
        !listener.is_private(),
        "another container's root may reach the path, so callers must show a token"
    );
}

#[tokio::test]
async fn the_default_socket_goes_away() {
    let listener = bind_workers(None).await.unwrap();
    assert!(listener.is_private());
    let ClusterListener::Unix { path, .. } = &listener else { panic!("not a Unix socket") };
    let path = path.clone();
    assert!(path.exists());
    drop(listener);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_tcp_listener_is_dialled_at_loopback() {
    let any = ClusterAddress::Tcp(SocketAddr::from(([0, 0, 0, 0], 0)));
    let listener = ClusterListener::bind(Callers::Workers, Some(&any), None, &allowing()).await.unwrap();
    assert!(listener.local_url().unwrap().starts_with("http://127.0.0.1:"));
}

#[tokio::test]
async fn an_address_that_others_reach_needs_certificates_or_the_flag() {
    for address in ["0.0.0.0:0", "[::]:0", "10.1.2.3:7000"] {
        let address = address.parse().unwrap();
        let error = bind_workers(Some(&address)).await.unwrap_err();
        assert_eq!(error.field(), Some("worker_listen"));
        let (address, message) = (address.to_string(), error.message());
        assert!(message.contains(&address) && message.contains("--insecure-plaintext"), "{error}");
    }
    let everywhere = "0.0.0.0:0".parse().unwrap();
    assert!(ClusterListener::bind(Callers::Routers, Some(&everywhere), None, &allowing()).await.is_ok());
    assert!(bind_workers(Some(&"127.0.0.1:0".parse().unwrap())).await.is_ok());
}

#[tokio::test]
async fn a_path_that_nobody_could_connect_to_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let inside = |bytes: usize| {
        let rest = bytes - directory.path().as_os_str().len() - 1;
        ClusterAddress::Unix(directory.path().join("s".repeat(rest)))
    };
    let longest = bind_workers(Some(&inside(listen::MAX_SOCKET_PATH))).await.unwrap();
    let ClusterListener::Unix { path, .. } = &longest else { panic!("not a Unix socket") };
    tokio::net::UnixStream::connect(path).await.unwrap();
    let error = bind_workers(Some(&inside(listen::MAX_SOCKET_PATH + 1))).await.unwrap_err();
    assert!(error.to_string().contains("has 108 bytes, the limit is 107"), "{error}");
}
