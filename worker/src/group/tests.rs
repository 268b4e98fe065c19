use std::net::{Ipv4Addr, TcpStream};

use super::*;

#[test]
fn a_leader_listens_only_where_its_ranks_dial() {
    let listen = pb::ListenForGroup { secret: vec![7; 16] };
    let message = pb::FormGroup { rank: 0, size: 2, meeting: Some(form_group::Meeting::Listen(listen)) };
    let group = Formation::new(message, Duration::from_secs(1), Ipv4Addr::LOCALHOST.into()).unwrap();
    let port = group.listening().unwrap().unwrap().port as u16;
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
    assert!(TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), port)).is_err());
}

#[test]
fn ranks_that_share_memory_reach_their_leader_where_others_reach_them() {
    let host = Ipv4Addr::new(10, 1, 2, 3).into();
    let meeting = Some(form_group::Meeting::SharedMemory("/tmp/group".into()));
    let message = pb::FormGroup { rank: 1, size: 2, meeting };
    assert_eq!(Formation::new(message, Duration::from_secs(1), host).unwrap().leader(), host);
}
