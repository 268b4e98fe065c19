//! Admission of ranks to a group. Rank 0 reads all new connections at once, so that a client that sends its greeting
//! byte by byte, or never, does not delay other ranks.

use std::{
    collections::VecDeque,
    io,
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{CollectiveError, Operation, RankLinks, RankStream, Terms, broken};

/// Time that a new connection has to authenticate.
const HELLO: Duration = Duration::from_secs(2);
/// Bytes of a greeting: the secret and the rank.
const GREETING: usize = 20;
/// Maximum number of connections that may authenticate at once. At the limit, the oldest such connection is closed: a
/// rank sends its greeting at once, so the oldest connection is probably not a rank's.
const MAX_STRANGERS: usize = 64;
/// Pause after an accept that the system refuses, for example for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection that has not authenticated yet.
struct Stranger {
    stream: Box<dyn RankStream>,
    greeting: [u8; GREETING],
    /// Number of bytes of the greeting that have been read.
    read: usize,
    since: Instant,
}

/// Waits for the ranks 1 to `size - 1`, and returns their connections in order.
pub(super) fn admit(
    listener: &TcpListener,
    size: usize,
    terms: &Terms,
) -> Result<Vec<Box<dyn RankStream>>, CollectiveError> {
    let Terms { secret, patience, links, .. } = *terms;
    let until = Instant::now() + patience;
    let mut admitted: Vec<Option<Box<dyn RankStream>>> = (1..size).map(|_| None).collect();
    let mut strangers: VecDeque<Stranger> = VecDeque::new();
    listener.set_nonblocking(true).map_err(|e| broken("listen", &e))?;
    while let Some(missing) = admitted.iter().position(Option::is_none) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let (rank, operation) = (missing + 1, Operation::Forming);
            return Err(CollectiveError::Missing { rank, size, operation, deadline: patience });
        }
        await_any(listener, &strangers, left.min(HELLO))?;
        match listener.accept() {
            Ok((stream, _)) => {
                if strangers.len() == MAX_STRANGERS {
                    strangers.pop_front();
                }
                strangers.extend(Stranger::new(stream, links));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => thread::sleep(PAUSE),
        }
        for _ in 0..strangers.len() {
            let Some(mut stranger) = strangers.pop_front() else { break };
            match stranger.hear(secret) {
                Ok(Some(rank)) => {
                    let slot = rank.checked_sub(1).and_then(|index| admitted.get_mut(index));
                    if let Some(slot @ None) = slot {
                        *slot = stranger.admitted().ok();
                    }
                }
                Ok(None) => strangers.push_back(stranger),
                // A client that does not know the secret, is slow, or has disconnected is ignored.
                Err(_) => {}
            }
        }
    }
    Ok(admitted.into_iter().flatten().collect())
}

impl Stranger {
    fn new(socket: TcpStream, links: &dyn RankLinks) -> Option<Self> {
        socket.set_nonblocking(true).ok()?;
        let stream = links.accepted(socket).ok()?;
        Some(Self { stream, greeting: [0; GREETING], read: 0, since: Instant::now() })
    }

    /// Reads the part of the greeting that has arrived. Returns the rank once the greeting is complete and its secret
    /// is right.
    fn hear(&mut self, secret: &[u8; 16]) -> io::Result<Option<usize>> {
        while self.read < GREETING {
            match self.stream.read(&mut self.greeting[self.read..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.read += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let late = self.since.elapsed() >= HELLO;
                    return if late { Err(io::ErrorKind::TimedOut.into()) } else { Ok(None) };
                }
                Err(error) => return Err(error),
            }
        }
        let (theirs, rank) = self.greeting.split_at(secret.len());
        // Compares in constant time, so that the duration reveals nothing about the secret.
        let differences = theirs.iter().zip(secret).fold(0, |differences, (a, b)| differences | (a ^ b));
        if differences != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(rank.first_chunk().map(|rank| u32::from_le_bytes(*rank) as usize))
    }

    /// Returns the connection with the socket options that collective operations need.
    fn admitted(self) -> io::Result<Box<dyn RankStream>> {
        self.stream.socket().set_nonblocking(false)?;
        self.stream.socket().set_nodelay(true)?;
        Ok(self.stream)
    }
}

/// Waits until a client connects or sends something, or `limit` has passed.
fn await_any(
    listener: &TcpListener,
    strangers: &VecDeque<Stranger>,
    limit: Duration,
) -> Result<(), CollectiveError> {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) as _ };
    let streams = strangers.iter().map(|stranger| PollFd::new(stranger.stream.socket(), PollFlags::IN));
    let mut polled: Vec<_> = streams.chain([PollFd::new(listener, PollFlags::IN)]).collect();
    match poll(&mut polled, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(broken("wait for other ranks", &error.into())),
    }
}
