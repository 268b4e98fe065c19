use std::net::{Ipv4Addr, TcpStream};

use tutti_proto::cluster::v1::form_group;

use super::*;

fn formation(rank: u32, nccl_id: Vec<u8>, own: Option<GroupId>) -> Result<Formation, Error> {
    let meeting = Some(form_group::Meeting::SharedMemory("/dev/shm/nobody-meets-here".to_owned()));
    Formation::new(
        pb::FormGroup { rank, size: 2, meeting, nccl_id },
        Duration::from_secs(1),
        IpAddr::from(Ipv4Addr::LOCALHOST).into(),
        own,
    )
}

#[test]
fn the_leaders_id_goes_out_and_comes_in_at_the_other_ranks() {
    let id = GroupId::from_bytes(&[7; 128]).unwrap();
    let leader = formation(0, Vec::new(), Some(id)).unwrap();
    let listening = leader.listening().unwrap().unwrap();
    assert_eq!((listening.port, listening.nccl_id.len()), (0, 128));
    let other = formation(1, listening.nccl_id, None).unwrap();
    assert_eq!(other.listening().unwrap(), None, "only the leader answers");
    for rank in [&leader, &other] {
        let meeting = rank.for_gpus().unwrap();
        assert_eq!((meeting.id, meeting.group_rank), (id, rank.group_rank));
    }
    assert!(formation(1, vec![7; 127], None).is_err());
}

#[test]
fn a_group_of_unlike_devices_is_refused() {
    let gpus = formation(1, vec![7; 128], None).unwrap();
    let why = gpus.for_cpus().map(|_| ()).unwrap_err();
    assert_eq!(why.field(), Some("device"));
    assert!(why.to_string().contains("computes on a GPU, and this rank on a CPU"), "{why}");
    let cpus = formation(1, Vec::new(), None).unwrap();
    let why = cpus.for_gpus().unwrap_err().to_string();
    assert!(why.contains("computes on a CPU, and this rank on a GPU"), "{why}");
}

#[test]
fn a_leader_listens_only_where_its_ranks_dial() {
    let listen = pb::ListenForGroup { secret: vec![7; 16] };
    let message = pb::FormGroup {
        rank: 0,
        size: 2,
        meeting: Some(form_group::Meeting::Listen(listen)),
        nccl_id: Vec::new(),
    };
    let group =
        Formation::new(message, Duration::from_secs(1), IpAddr::from(Ipv4Addr::LOCALHOST).into(), None)
            .unwrap();
    let port = group.listening().unwrap().unwrap().port as u16;
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
    assert!(TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), port)).is_err());
}

#[test]
fn ranks_that_share_memory_reach_their_leader_where_others_reach_them() {
    let host = IpAddr::from(Ipv4Addr::new(10, 1, 2, 3));
    let meeting = Some(form_group::Meeting::SharedMemory("/tmp/group".into()));
    let message = pb::FormGroup { rank: 1, size: 2, meeting, nccl_id: Vec::new() };
    assert_eq!(Formation::new(message, Duration::from_secs(1), host.into(), None).unwrap().leader(), host);
}
