use std::net::SocketAddr;

use super::*;

#[tokio::test]
async fn a_dead_conductors_socket_is_replaced_and_a_live_ones_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let address = WorkerAddress::Unix(directory.path().join("socket"));
    let first = WorkerListener::bind(Some(&address)).await.unwrap();
    let error = WorkerListener::bind(Some(&address)).await.unwrap_err();
    assert_eq!(error.field(), Some("worker_listen"));
    drop(first);
    assert!(WorkerListener::bind(Some(&address)).await.is_ok());
}

#[tokio::test]
async fn the_default_socket_goes_away() {
    let listener = WorkerListener::bind(None).await.unwrap();
    let WorkerListener::Unix { path, .. } = &listener else { panic!("not a Unix socket") };
    let path = path.clone();
    assert!(path.exists());
    drop(listener);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_tcp_listener_is_dialled_at_loopback() {
    let any = WorkerAddress::Tcp(SocketAddr::from(([0, 0, 0, 0], 0)));
    let listener = WorkerListener::bind(Some(&any)).await.unwrap();
    assert!(listener.local_url().unwrap().starts_with("http://127.0.0.1:"));
}
