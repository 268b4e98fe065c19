use std::net::TcpStream;

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
