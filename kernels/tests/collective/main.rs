//! Tests the collectives of groups whose ranks are threads of one process. They use the same shared memory and sockets
//! as processes do.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use tutti_kernels::collective::{
    Collective, CollectiveError, GroupRank, Operation, Patience, PlainLinks, SharedMemory, Tcp, Terms,
};

const LONG: Duration = Duration::from_secs(60);
const SECRET: &[u8; 16] = b"0123456789abcdef";

fn terms(secret: &[u8; 16], patience: Duration, deadline: Duration) -> Terms<'_> {
    Terms { secret, patience, deadline, links: &PlainLinks }
}

type Member = Box<dyn Collective>;

/// The transport of a test's group.
#[derive(Clone, Copy, Debug)]
enum Transport {
    SharedMemory,
    Tcp,
}

const BOTH: [Transport; 2] = [Transport::SharedMemory, Transport::Tcp];

/// Runs `act` as every rank of a group, and returns the results in the order of ranks.
fn group<T: Send>(
    transport: Transport,
    size: usize,
    deadline: Duration,
    act: impl Fn(Member) -> T + Sync,
) -> Vec<T> {
    let directory = tempfile::tempdir().unwrap();
    let path: PathBuf = directory.path().join("group");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let meet = |rank| -> Member {
        let group_rank = GroupRank { rank, world_size: size };
        match transport {
            Transport::SharedMemory => {
                Box::new(SharedMemory::meet(&path, group_rank, LONG, deadline).unwrap())
            }
            Transport::Tcp if rank == 0 => {
                Box::new(Tcp::accept(&listener, size, &terms(SECRET, LONG, deadline)).unwrap())
            }
            Transport::Tcp => {
                Box::new(Tcp::connect(address, group_rank, &terms(SECRET, LONG, deadline)).unwrap())
            }
        }
    };
    let results = thread::scope(|scope| {
        let (meet, act) = (&meet, &act);
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || act(meet(rank)))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(!path.exists(), "nothing is left of the meeting");
    results
}

/// Returns values whose sum in f32 depends on the order of the additions.
fn values(rank: usize, len: usize) -> Vec<f32> {
    let value = |i: usize| {
        let bits = (i * 2_654_435_761 + rank * 40_503) % 1_000_003;
        (bits as f32 - 500_000.0) * 10f32.powi((bits % 9) as i32 - 4)
    };
    (0..len).map(value).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_sum_is_taken_in_the_order_of_ranks_whatever_its_size_and_transport() {
    // Lengths around the limits: nothing, one float, the longest sum that every rank computes, one tile, and several
    // tiles with a remainder.
    let lengths = [0, 1, 7, 8 << 10, (8 << 10) + 1, 64 << 10, (64 << 10) + 5, 200_003];
    for transport in BOTH {
        for size in [1, 2, 3, 4] {
            let sums = group(transport, size, LONG, |mut member| {
                let rank = member.group_rank().rank;
                lengths.map(|len| {
                    let mut data = values(rank, len);
                    member.all_reduce(&mut data).unwrap();
                    bits(&data)
                })
            });
            for (index, len) in lengths.into_iter().enumerate() {
                let mut expected = values(0, len);
                for rank in 1..size {
                    expected.iter_mut().zip(values(rank, len)).for_each(|(sum, value)| *sum += value);
                }
                let expected = bits(&expected);
                for sum in &sums {
                    assert!(sum[index] == expected, "{transport:?}: {len} floats of {size} ranks");
                }
            }
        }
    }
}

#[test]
fn gathered_parts_stand_in_the_order_of_ranks() {
    for transport in BOTH {
        for len in [0, 3, 100_000] {
            let expected: Vec<f32> = (0..3).flat_map(|rank| values(rank, len)).collect();
            let gathered = group(transport, 3, LONG, |mut member| {
                let rank = member.group_rank().rank;
                let mut out = vec![0.0; 3 * len];
                let to = member.group_rank().is_leader().then_some(&mut out[..]);
                member.gather(&values(rank, len), to).unwrap();
                let mut all = Vec::new();
                member.all_gather(&[rank as u8; 5], &mut all).unwrap();
                assert_eq!(all, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
                out
            });
            assert!(bits(&gathered[0]) == bits(&expected), "{transport:?}: {len} floats");
        }
    }
}

#[test]
fn bytes_are_gathered_at_rank_0_and_scattered_from_it() {
    // The lengths are zero bytes, one byte, and several tiles with a remainder.
    for (transport, len) in
        BOTH.into_iter().flat_map(|transport| [0, 1, 1_000_003].map(|len| (transport, len)))
    {
        let part = |rank: usize| (0..len).map(|i| (i * 31 + rank * 7) as u8).collect::<Vec<u8>>();
        let all: Vec<u8> = (0..3).flat_map(part).collect();
        group(transport, 3, LONG, |mut member| {
            let (rank, leads) = (member.group_rank().rank, member.group_rank().is_leader());
            let mut gathered = vec![0; 3 * len];
            member.gather_bytes(&part(rank), leads.then_some(&mut gathered[..])).unwrap();
            assert!(!leads || gathered == all, "{transport:?}: {len} bytes gathered");
            let mut own = vec![0; len];
            member.scatter_bytes(leads.then_some(&all[..]), &mut own).unwrap();
            assert!(own == part(rank), "{transport:?}: {len} bytes scattered to rank {rank}");
        });
    }
}

#[test]
fn parts_of_another_length_than_the_ranks_need_are_refused() {
    for transport in BOTH {
        group(transport, 2, LONG, |mut member| {
            let (parts, leads) = ([0; 3], member.group_rank().is_leader());
            let scattered = member.scatter_bytes(Some(&parts), &mut [0; 2]);
            assert!(matches!(scattered, Err(CollectiveError::Misuse(_))), "{scattered:?}");
            let gathered = member.gather_bytes(&[0; 2], (!leads).then_some(&mut [0; 4][..]));
            assert!(matches!(gathered, Err(CollectiveError::Misuse(_))), "{gathered:?}");
        });
    }
}

#[test]
fn every_rank_gets_the_messages_of_rank_0_in_order() {
    let message = |number: usize| vec![number as u8; [0, 1, 1000, 600_000][number % 4]];
    for transport in BOTH {
        group(transport, 3, LONG, |mut member| {
            for number in 0..40 {
                let mut heard = if member.group_rank().is_leader() { message(number) } else { vec![9; 3] };
                member.broadcast(&mut heard, Patience::Forever).unwrap();
                assert!(heard == message(number), "{transport:?}: message {number}");
            }
        });
    }
}

#[test]
fn no_rank_leaves_a_barrier_before_all_have_arrived() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for transport in BOTH {
        let come = AtomicUsize::new(0);
        group(transport, 4, LONG, |mut member| {
            for round in 1..=200 {
                come.fetch_add(1, Ordering::SeqCst);
                member.barrier().unwrap();
                assert!(come.load(Ordering::SeqCst) >= 4 * round, "{transport:?}");
            }
        });
    }
}

/// Runs collectives of all kinds and sizes back to back, so that each begins while other ranks still finish the
/// previous one.
#[test]
fn calls_do_not_run_into_each_other() {
    for transport in BOTH {
        let rounds = if matches!(transport, Transport::SharedMemory) { 3_000 } else { 300 };
        let sums = group(transport, 3, LONG, |mut member| {
            let rank = member.group_rank().rank;
            let mut digest = 0u64;
            for round in 0..rounds {
                let mut data = values(rank + round, [1, 100, 9_000, 70_000][round % 4] >> (round % 3));
                member.all_reduce(&mut data).unwrap();
                digest = bits(&data).iter().fold(digest, |d, &b| d.rotate_left(5) ^ u64::from(b));
                if round % 7 == 0 {
                    let mut word = digest.to_le_bytes().to_vec();
                    member.broadcast(&mut word, Patience::Deadline).unwrap();
                    assert_eq!(word, digest.to_le_bytes());
                }
            }
            digest
        });
        assert!(sums.iter().all(|sum| *sum == sums[0]), "{transport:?}: {sums:?}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let deadline = Duration::from_millis(300);
    for transport in BOTH {
        let (told, tell) = std::sync::mpsc::channel();
        let told = std::sync::Mutex::new(Some(told));
        let tell = std::sync::Mutex::new(tell);
        let errors = group(transport, 3, deadline, |mut member| {
            if member.group_rank().rank == 2 {
                // This rank does not join, and does not leave before the other ranks have failed.
                let tell = tell.lock().unwrap();
                tell.recv().unwrap();
                return None;
            }
            let began = Instant::now();
            let error = member.all_reduce(&mut [1.0; 3]).unwrap_err();
            assert!(began.elapsed() < 20 * deadline, "{transport:?}: {error} after {:?}", began.elapsed());
            if member.group_rank().is_leader() {
                told.lock().unwrap().take().unwrap().send(()).unwrap();
            }
            Some(error)
        });
        let missing =
            CollectiveError::Missing { rank: 2, size: 3, operation: Operation::AllReduce, deadline };
        assert_eq!(errors[0], Some(missing.clone()), "{transport:?}");
        let told = errors[1].clone().unwrap().to_string();
        assert!(told.contains("rank 2 of 3") || told.contains("rank 0 of 3"), "{transport:?}: {told}");
    }
}

#[test]
fn a_rank_that_leaves_is_noticed_at_once() {
    for transport in BOTH {
        let errors = group(transport, 2, LONG, |mut member| {
            (!member.group_rank().is_leader())
                .then(|| member.broadcast(&mut Vec::new(), Patience::Forever).unwrap_err())
        });
        assert_eq!(errors[1], Some(CollectiveError::Left { rank: 0, size: 2 }), "{transport:?}");
    }
}

#[test]
fn ranks_at_different_calls_are_told_so() {
    for transport in BOTH {
        let errors = group(transport, 2, LONG, |mut member| {
            let len = 4 + member.group_rank().rank;
            member.all_reduce(&mut vec![0.0; len]).unwrap_err()
        });
        assert!(
            errors.iter().any(|error| matches!(error, CollectiveError::Mismatch { .. })),
            "{transport:?}: {errors:?}"
        );
    }
}

#[test]
fn a_gather_into_too_little_is_refused_before_anything_travels() {
    for transport in BOTH {
        group(transport, 2, LONG, |mut member| {
            let error = member.gather(&[1.0, 2.0], Some(&mut [0.0; 3])).unwrap_err();
            assert!(matches!(error, CollectiveError::Misuse(_)), "{transport:?}: {error}");
            member.barrier().unwrap();
        });
    }
}

#[test]
fn a_stranger_takes_no_rank() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let group_rank = GroupRank { rank: 1, world_size: 2 };
    thread::scope(|scope| {
        let leader = scope.spawn(|| Tcp::accept(&listener, 2, &terms(SECRET, LONG, LONG)));
        let stranger = Tcp::connect(address, group_rank, &terms(b"fedcba9876543210", LONG, LONG));
        assert!(matches!(stranger, Err(CollectiveError::Left { rank: 0, .. })), "{:?}", stranger.err());
        let member = Tcp::connect(address, group_rank, &terms(SECRET, LONG, LONG)).unwrap();
        leader.join().unwrap().unwrap();
        drop(member);
    });
}

#[test]
fn strangers_that_drip_do_not_delay_a_group() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let group_rank = GroupRank { rank: 1, world_size: 2 };
    // Each of these clients alone would block a leader that reads one connection at a time: each byte comes before the
    // read times out, and the whole greeting would take longer than the group may take to form.
    let formed = AtomicBool::new(false);
    let strangers: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !formed.load(Relaxed) {
                for mut stranger in &strangers {
                    // The write may fail, because the leader may have closed the connection.
                    let _ = stranger.write_all(b"x");
                }
                thread::sleep(Duration::from_millis(300));
            }
        });
        let leader = scope.spawn(|| Tcp::accept(&listener, 2, &terms(SECRET, Duration::from_secs(10), LONG)));
        let member = Tcp::connect(address, group_rank, &terms(SECRET, LONG, LONG));
        let leader = leader.join().unwrap();
        formed.store(true, Relaxed);
        leader.unwrap();
        member.unwrap();
    });
}
