use std::{
    net::TcpStream,
    os::unix::{fs::PermissionsExt, net::UnixStream},
};

use super::*;

#[test]
fn only_the_given_address_is_bound() {
    let listener = bind(Ipv4Addr::LOCALHOST.into()).unwrap();
    let address = listener.local_addr().unwrap();
    assert!(address.ip().is_loopback());
    assert!(TcpStream::connect(address).is_ok());
    // This is another address of this machine. A listener on all addresses would accept the connection.
    assert!(TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), address.port())).is_err());
}

#[test]
fn an_address_of_a_translator_is_no_reason_to_fail() {
    // An address for documentation (RFC 5737), which no machine has.
    let listener = bind(Ipv4Addr::new(192, 0, 2, 1).into()).unwrap();
    assert!(listener.local_addr().unwrap().ip().is_unspecified());
}

/// A network whose workers are all on this machine, and the directory of their sockets.
fn local() -> (Network, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let sockets = Some(directory.path().to_path_buf());
    (Network { sockets, ..IpAddr::from(Ipv4Addr::LOCALHOST).into() }, directory)
}

fn path(address: ServiceAddress) -> PathBuf {
    match address {
        ServiceAddress::Socket(path) => path.into(),
        ServiceAddress::Port(port) => panic!("a port: {port}"),
    }
}

#[tokio::test]
async fn workers_of_one_machine_listen_on_sockets_of_this_user() {
    let (network, _directory) = local();
    let (_first, address) = network.listen().unwrap();
    let (_second, other) = network.listen().unwrap();
    assert_ne!(address, other);
    for address in [address, other] {
        let path = path(address);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
        assert!(network.dial(&format!("unix:{}", path.display())).is_ok());
    }
}

#[tokio::test]
async fn sockets_of_killed_workers_are_removed() {
    let (network, directory) = local();
    let (killed, address) = network.listen().unwrap();
    drop(killed);
    let (kept, left) = (directory.path().join("planes-of-another-program"), path(address));
    fs::write(&kept, "a file").unwrap();
    assert!(left.exists(), "a closed socket leaves its file");
    let (_listener, live) = network.listen().unwrap();
    assert!(!left.exists());
    assert!(kept.exists(), "a file that is no socket stays");
    let _another = network.listen().unwrap();
    assert!(path(live).exists(), "the socket of a live worker stays");
}

#[tokio::test]
async fn workers_that_start_at_once_remove_the_same_sockets() {
    let (network, _directory) = local();
    for _ in 0..20 {
        let killed: Vec<_> = (0..20).map(|_| network.listen().unwrap()).collect();
        drop(killed);
        let starts: Vec<_> = (0..4)
            .map(|_| {
                let network = network.clone();
                tokio::task::spawn_blocking(move || network.listen().unwrap().1)
            })
            .collect();
        for start in starts {
            start.await.unwrap();
        }
    }
}

#[test]
fn sockets_are_beside_a_socket_of_the_conductor() {
    let beside = |conductor| Network::sockets_beside(conductor);
    assert_eq!(beside("unix:/run/tutti/workers.sock"), Some("/run/tutti".into()));
    assert_eq!(beside("unix:workers.sock"), std::env::current_dir().ok());
    assert_eq!(beside("http://127.0.0.1:7000"), None);
}

#[tokio::test]
async fn workers_of_several_machines_listen_on_ports() {
    let network = Network::from(IpAddr::from(Ipv4Addr::LOCALHOST));
    let (_listener, address) = network.listen().unwrap();
    let (port, socket) = address.into_fields();
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port as u16)).is_ok());
    assert_eq!(socket, "");
}

#[test]
fn an_address_is_a_socket_or_a_port() {
    let host = Ipv4Addr::new(192, 0, 2, 7).into();
    assert_eq!(ServiceAddress::dialled(host, 80, ""), "192.0.2.7:80");
    assert_eq!(ServiceAddress::dialled(host, 0, "/run/planes-1"), "unix:/run/planes-1");
    assert_eq!(ServiceAddress::dialled(host, 1 << 16, ""), "192.0.2.7:0", "no worker listens there");
}
