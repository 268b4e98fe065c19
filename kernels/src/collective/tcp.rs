//! Collectives of ranks on several machines, over TCP: a star with rank 0 at the centre.
//!
//! All data goes through rank 0. Rank 0 therefore detects a missing rank, and reports it to the other ranks before rank
//! 0's own call fails. A secret keeps other clients out of the group. [`RankLinks`] may
//! encrypt the connections.

mod admission;
mod links;

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::{Collective, CollectiveError, GroupRank, Operation, Patience, check_parts, mapping::bytes_of};

pub use self::links::{PlainLinks, RankLinks, RankStream};

/// Maximum number of bytes per transfer (a tile). Rank 0 buffers one tile of one other rank at a time.
const TILE_BYTES: usize = 256 << 10;
/// Size in bytes of a header: operation and length.
const HEADER: usize = 8;
/// Operation code of a header by which rank 0 reports that it has failed. The reason follows the header.
const GIVEN_UP: u8 = 0;
/// Maximum length of a reason in bytes.
const MAX_REASON: usize = 1 << 10;

/// One rank of a group over TCP.
pub struct Tcp {
    group_rank: GroupRank,
    deadline: Duration,
    /// At rank 0, the other ranks in order; at another rank, only rank 0.
    peers: Vec<Peer>,
    tile: Vec<u8>,
}

struct Peer {
    rank: usize,
    stream: Box<dyn RankStream>,
}

/// The terms on which ranks form a group.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// The secret that all ranks know.
    pub secret: &'a [u8; 16],
    /// Time limit of the formation.
    pub patience: Duration,
    /// Time limit of every later collective.
    pub deadline: Duration,
    /// The connections between ranks.
    pub links: &'a dyn RankLinks,
}

/// The operation and the time limit of one call.
#[derive(Clone, Copy)]
struct Call {
    operation: Operation,
    size: usize,
    deadline: Duration,
    /// Time at which the call fails; `None` for no limit.
    until: Option<Instant>,
}

impl Tcp {
    /// Forms the group at rank 0: waits for `size - 1` ranks that know the secret.
    pub fn accept(listener: &TcpListener, size: usize, terms: &Terms) -> Result<Self, CollectiveError> {
        let admitted = admission::admit(listener, size, terms)?;
        let peers = (1..).zip(admitted).map(|(rank, stream)| Peer { rank, stream });
        let mut group = Self {
            group_rank: GroupRank { rank: 0, world_size: size },
            deadline: terms.deadline,
            peers: peers.collect(),
            tile: Vec::new(),
        };
        group.broadcast(&mut Vec::new(), Patience::Deadline)?;
        Ok(group)
    }

    /// Joins the group at a rank other than 0: dials rank 0 and waits until all ranks have joined.
    pub fn connect(
        address: SocketAddr,
        group_rank: GroupRank,
        terms: &Terms,
    ) -> Result<Self, CollectiveError> {
        let Terms { secret, patience, deadline, links } = *terms;
        let failed = |e: io::Error| broken(&format!("reach rank 0 at {address}"), &e);
        let socket = TcpStream::connect_timeout(&address, patience).map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        // The read timeout is as long as the formation may take, because rank 0 may still be loading and then answers
        // the handshake late.
        socket.set_read_timeout(Some(patience)).map_err(failed)?;
        let mut stream = links.dialed(socket).map_err(failed)?;
        let mut hello = secret.to_vec();
        hello.extend((group_rank.rank as u32).to_le_bytes());
        stream.write_all(&hello).and_then(|()| stream.flush()).map_err(failed)?;
        let peers = vec![Peer { rank: 0, stream }];
        let mut group = Self { group_rank, deadline: patience, peers, tile: Vec::new() };
        group.broadcast(&mut Vec::new(), Patience::Deadline)?;
        group.deadline = deadline;
        Ok(group)
    }

    fn call(&self, operation: Operation, patience: Patience) -> Call {
        let until = (patience == Patience::Deadline).then(|| Instant::now() + self.deadline);
        Call { operation, size: self.group_rank.world_size, deadline: self.deadline, until }
    }

    /// Runs `act`. If it fails at rank 0, reports the reason to the other ranks.
    fn run(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let outcome = act(self);
        if let (Err(error), true) = (&outcome, self.group_rank.is_leader()) {
            let mut reason = error.to_string().into_bytes();
            reason.truncate(MAX_REASON);
            for peer in &mut self.peers {
                // Failures to send are ignored: a rank that does not get the reason sees its stream end when rank 0
                // closes it. The timeout limits how long a peer that does not read can block rank 0.
                let _ = peer.stream.socket().set_write_timeout(Some(Duration::from_millis(100)));
                let _ = peer.stream.write_all(&header(GIVEN_UP, reason.len()));
                let _ = peer.stream.write_all(&reason).and_then(|()| peer.stream.flush());
            }
        }
        outcome
    }

    /// Sends one tile from each rank to rank 0. Rank 0 calls `merge` with each rank's tile, in the order of ranks.
    fn up(
        &mut self,
        call: Call,
        tile: &[u8],
        mut merge: impl FnMut(usize, &[u8]),
    ) -> Result<(), CollectiveError> {
        if !self.group_rank.is_leader() {
            return self.peers[0].send(call, tile);
        }
        self.tile.resize(tile.len(), 0);
        for peer in &mut self.peers {
            let len = peer.receive_header(call)?;
            if len != tile.len() {
                return Err(peer.differs(call, call.operation as u8, len, tile.len()));
            }
            peer.receive(call, &mut self.tile)?;
            merge(peer.rank, &self.tile);
        }
        Ok(())
    }

    /// Sends bytes from rank 0 to all other ranks.
    fn down(&mut self, call: Call, data: &mut [u8]) -> Result<(), CollectiveError> {
        if self.group_rank.is_leader() {
            return self.peers.iter_mut().try_for_each(|peer| peer.send(call, data));
        }
        let peer = &mut self.peers[0];
        let len = peer.receive_header(call)?;
        if len != data.len() {
            return Err(peer.differs(call, call.operation as u8, len, data.len()));
        }
        peer.receive(call, data)
    }
}

impl Collective for Tcp {
    fn group_rank(&self) -> GroupRank {
        self.group_rank
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        self.run(|group| {
            let call = group.call(Operation::AllReduce, Patience::Deadline);
            let mut bytes = Vec::new();
            for tile in data.chunks_mut(TILE_BYTES / 4) {
                bytes.clear();
                bytes.extend_from_slice(bytes_of(tile));
                group.up(call, &bytes, |_, theirs| {
                    let theirs = theirs.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x));
                    tile.iter_mut().zip(theirs).for_each(|(sum, theirs)| *sum += theirs);
                })?;
                bytes.clear();
                bytes.extend_from_slice(bytes_of(tile));
                group.down(call, &mut bytes)?;
                for (to, from) in tile.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *to = f32::from_ne_bytes(*from);
                }
            }
            Ok(())
        })
    }

    fn gather(&mut self, part: &[f32], mut out: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "gather into", part.len(), out.as_deref().map(<[f32]>::len))?;
        if let Some(out) = &mut out {
            out[..part.len()].copy_from_slice(part);
        }
        self.run(|group| {
            let call = group.call(Operation::Gather, Patience::Deadline);
            for (index, tile) in part.chunks(TILE_BYTES / 4).enumerate() {
                let first = index * TILE_BYTES / 4;
                group.up(call, bytes_of(tile), |rank, theirs| {
                    let out = out.iter_mut().flat_map(|out| &mut out[rank * part.len() + first..]);
                    for (to, from) in out.zip(theirs.as_chunks::<4>().0) {
                        *to = f32::from_ne_bytes(*from);
                    }
                })?;
            }
            Ok(())
        })
    }

    fn gather_bytes(&mut self, part: &[u8], mut out: Option<&mut [u8]>) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "gather into", part.len(), out.as_deref().map(<[u8]>::len))?;
        if let Some(out) = &mut out {
            out[..part.len()].copy_from_slice(part);
        }
        self.run(|group| {
            let call = group.call(Operation::Gather, Patience::Deadline);
            for (index, tile) in part.chunks(TILE_BYTES).enumerate() {
                group.up(call, tile, |rank, theirs| {
                    if let Some(out) = &mut out {
                        let first = rank * part.len() + index * TILE_BYTES;
                        out[first..first + theirs.len()].copy_from_slice(theirs);
                    }
                })?;
            }
            Ok(())
        })
    }

    fn scatter_bytes(&mut self, parts: Option<&[u8]>, part: &mut [u8]) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "scatter", part.len(), parts.map(<[u8]>::len))?;
        self.run(|group| {
            let call = group.call(Operation::Scatter, Patience::Deadline);
            let Some(parts) = parts else { return group.down(call, part) };
            part.copy_from_slice(&parts[..part.len()]);
            group.peers.iter_mut().try_for_each(|peer| {
                let first = peer.rank * part.len();
                peer.send(call, &parts[first..first + part.len()])
            })
        })
    }

    fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError> {
        out.clear();
        out.resize(part.len() * self.group_rank.world_size, 0);
        out[..part.len()].copy_from_slice(part);
        self.run(|group| {
            let call = group.call(Operation::AllGather, Patience::Deadline);
            group.up(call, part, |rank, theirs| {
                out[rank * theirs.len()..][..theirs.len()].copy_from_slice(theirs);
            })?;
            group.down(call, out)
        })
    }

    fn broadcast(&mut self, message: &mut Vec<u8>, patience: Patience) -> Result<(), CollectiveError> {
        self.run(|group| {
            let call = group.call(Operation::Broadcast, patience);
            if group.group_rank.is_leader() {
                return group.down(call, message);
            }
            let len = group.peers[0].receive_header(call)?;
            message.clear();
            message.resize(len, 0);
            let call = group.call(Operation::Broadcast, Patience::Deadline);
            group.peers[0].receive(call, message)
        })
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        for peer in &self.peers {
            // Ignored: an error means that the other side has already closed the stream.
            let _ = peer.stream.socket().shutdown(Shutdown::Both);
        }
    }
}

impl Peer {
    fn send(&mut self, call: Call, data: &[u8]) -> Result<(), CollectiveError> {
        for mut rest in [&header(call.operation as u8, data.len())[..], data] {
            while !rest.is_empty() {
                self.limit_write(call)?;
                match self.stream.write(rest) {
                    Ok(written) => rest = &rest[written..],
                    Err(error) => self.check(call, &error)?,
                }
            }
        }
        loop {
            match self.stream.flush() {
                Ok(()) => return Ok(()),
                Err(error) => self.check(call, &error)?,
            }
            self.limit_write(call)?;
        }
    }

    fn limit_write(&self, call: Call) -> Result<(), CollectiveError> {
        let left = self.left(call)?;
        self.stream.socket().set_write_timeout(left).map_err(|e| self.fault(call, &e))
    }

    /// Receives a header and returns the length of the data that follows. Returns an error if the header names another
    /// operation than `call`.
    fn receive_header(&mut self, call: Call) -> Result<usize, CollectiveError> {
        let mut bytes = [0; HEADER];
        self.receive(call, &mut bytes)?;
        let (code, len) = (bytes[7], (u64::from_le_bytes(bytes) & ((1 << 56) - 1)) as usize);
        if code == GIVEN_UP {
            let mut reason = vec![0; len.min(MAX_REASON)];
            self.receive(call, &mut reason)?;
            return Err(CollectiveError::Transport(String::from_utf8_lossy(&reason).into_owned()));
        }
        if code != call.operation as u8 {
            return Err(self.differs(call, code, len, len));
        }
        Ok(len)
    }

    fn receive(&mut self, call: Call, mut data: &mut [u8]) -> Result<(), CollectiveError> {
        while !data.is_empty() {
            let left = self.left(call)?;
            self.stream.socket().set_read_timeout(left).map_err(|e| self.fault(call, &e))?;
            match self.stream.read(data) {
                Ok(0) => return Err(CollectiveError::Left { rank: self.rank, size: call.size }),
                Ok(read) => data = &mut data[read..],
                Err(error) => self.check(call, &error)?,
            }
        }
        Ok(())
    }

    /// Time left for the call; `None` for no limit.
    fn left(&self, call: Call) -> Result<Option<Duration>, CollectiveError> {
        match call.until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => Err(self.missing(call)),
            left => Ok(left),
        }
    }

    fn check(&self, call: Call, error: &io::Error) -> Result<(), CollectiveError> {
        match error.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(()),
            _ => Err(self.fault(call, error)),
        }
    }

    fn missing(&self, call: Call) -> CollectiveError {
        let Call { operation, size, deadline, .. } = call;
        CollectiveError::Missing { rank: self.rank, size, operation, deadline }
    }

    fn fault(&self, call: Call, error: &io::Error) -> CollectiveError {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                CollectiveError::Left { rank: self.rank, size: call.size }
            }
            _ => broken(&format!("talk to rank {}", self.rank), error),
        }
    }

    fn differs(&self, call: Call, code: u8, theirs: usize, ours: usize) -> CollectiveError {
        let name = Operation::from_code(code).map_or("no call".to_owned(), |o| o.to_string());
        CollectiveError::Mismatch {
            rank: self.rank,
            theirs: format!("{name} of {theirs} bytes"),
            ours: format!("{} of {ours} bytes", call.operation),
        }
    }
}

fn header(code: u8, len: usize) -> [u8; HEADER] {
    (u64::from(code) << 56 | len as u64).to_le_bytes()
}

fn broken(what: &str, error: &io::Error) -> CollectiveError {
    CollectiveError::Transport(format!("cannot {what}: {error}"))
}
