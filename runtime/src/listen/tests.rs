use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use super::{BACKLOG, tcp};

/// Shorter than the second after which a client retransmits its first packet.
const AT_ONCE: Duration = Duration::from_millis(900);

#[tokio::test]
async fn a_burst_of_connections_waits_for_its_accept_and_delays_nobody() {
    let listener = tcp("http", SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let system: u32 = fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
    let burst = BACKLOG.min(system).min(400);
    let connected = (0..burst).map(|_| TcpStream::connect_timeout(&address, AT_ONCE));
    let waiting: Vec<_> = connected.collect::<Result<_, _>>().unwrap();
    assert_eq!(waiting.len(), burst as usize);
}

#[tokio::test]
async fn a_port_in_use_is_an_error_of_its_setting() {
    let first = tcp("http", SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let error = tcp("http", first.local_addr().unwrap()).unwrap_err();
    assert!(error.to_string().contains("cannot listen on 127.0.0.1:"), "{error}");
    assert_eq!(error.field(), Some("http"));
}
