use std::net::Ipv4Addr;

use super::*;

#[test]
fn only_a_worker_of_this_machine_names_a_socket() {
    let here = IpAddr::from(Ipv4Addr::LOCALHOST);
    assert_eq!(address(here, 0, "/run/planes-1"), "unix:/run/planes-1");
    assert_eq!(address(here, 80, ""), "127.0.0.1:80");
    let elsewhere = Ipv4Addr::new(192, 0, 2, 7).into();
    assert_eq!(address(elsewhere, 80, "/run/planes-1"), "192.0.2.7:80");
}
