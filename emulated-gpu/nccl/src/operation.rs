//! Operations: a rank's sends and receives, and the results that it computes from them.
//!
//! The operations of a group run in three passes. In the first pass, each operation sends. In the second, each
//! receives. In the third, each send waits until its data has arrived. So two ranks that send to each other inside a
//! group do not deadlock. A send outside a group waits for its receive, which NCCL allows.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use tutti_emulated_exports::{DriverError, StreamContext};

use crate::communicator::{Channel, Communicator, Message, Stopped};
use crate::result::Error;
use crate::value::{Kind, Reduction, reduce};

/// Kind of an operation, with its peer or root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// Every rank gets the reduction of all ranks' data.
    AllReduce,
    /// Every rank gets the data of all ranks, in the order of ranks.
    AllGather,
    /// Each rank gets its share of the reduction of all ranks' data.
    ReduceScatter,
    /// Every rank gets the root's buffer.
    Broadcast { root: usize },
    /// The root gets the reduction of all ranks' data.
    Reduce { root: usize },
    /// One rank sends to another.
    Send { peer: usize },
    /// One rank receives from another.
    Receive { peer: usize },
}

/// An operation of a rank. The communicator counts it as outstanding until it is dropped.
pub struct Operation {
    /// The communicator.
    pub communicator: Arc<Communicator>,
    /// Context of the stream.
    pub of: StreamContext,
    /// Kind of the operation.
    pub call: Call,
    /// Name of the C function.
    pub name: &'static str,
    /// Device address of the data to send.
    pub source: u64,
    /// Device address of the result.
    pub target: u64,
    /// Number of elements that the program passed.
    pub count: usize,
    /// Element type.
    pub kind: Kind,
    /// Reduction; unused by calls that do not reduce.
    pub reduction: Reduction,
    /// Number of the operation, as [`Communicator::next_collective`] and similar methods give it.
    pub number: u64,
}

/// The reason for which an operation ended early.
enum Failure {
    Stopped,
    Driver(DriverError),
}

impl From<Stopped> for Failure {
    fn from(_: Stopped) -> Self {
        Failure::Stopped
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Failure::Driver(error)
    }
}

/// Returns the size in bytes of an operation's source and target, on `rank` of a group of `size` ranks. The size is 0
/// for a buffer that the rank does not use.
pub fn buffer_bytes(call: Call, count: usize, kind: Kind, rank: usize, size: usize) -> (usize, usize) {
    let part = count * kind.bytes();
    match call {
        Call::AllReduce => (part, part),
        Call::AllGather => (part, part * size),
        Call::ReduceScatter => (part * size, part),
        Call::Broadcast { root } => (if rank == root { part } else { 0 }, part),
        Call::Reduce { root } => (part, if rank == root { part } else { 0 }),
        Call::Send { .. } => (part, 0),
        Call::Receive { .. } => (0, part),
    }
}

/// Runs the operations that a group submits to one stream.
///
/// # Errors
///
/// The driver's error for a buffer that does not lie in one allocation. An abort is not an error, and the stream
/// continues.
pub fn run(operations: &[Operation]) -> Result<(), DriverError> {
    match passes(operations) {
        Ok(()) | Err(Failure::Stopped) => Ok(()),
        Err(Failure::Driver(error)) => Err(error),
    }
}

fn passes(operations: &[Operation]) -> Result<(), Failure> {
    for operation in operations {
        operation.send_all()?;
    }
    for operation in operations {
        operation.receive_all()?;
    }
    for operation in operations {
        if let Call::Send { peer } = operation.call {
            operation.communicator.receive((peer, Channel::Arrived, operation.number))?;
        }
    }
    Ok(())
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.communicator.end_operation();
    }
}

impl Operation {
    /// Returns a hash of the arguments that must be equal on all ranks.
    fn signature(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let point_to_point = matches!(self.call, Call::Send { .. } | Call::Receive { .. });
        let call = if point_to_point { None } else { Some((self.call, self.reduction as u8)) };
        (call, self.count, self.kind as u8).hash(&mut hasher);
        hasher.finish()
    }

    fn message(&self, bytes: &[u8]) -> Message {
        Message { signature: self.signature(), bytes: bytes.to_vec() }
    }

    /// Sends the data that the ranks need. A rank sends its own share to itself in the same way.
    fn send_all(&self) -> Result<(), Failure> {
        let communicator = &self.communicator;
        let (rank, size) = (communicator.rank, communicator.size);
        if communicator.driver.never_joins(communicator.of.device, self.name) {
            eprintln!("emulated NCCL: rank {rank} of {size} never joins {}, on demand", self.name);
            communicator.wait_for_abort();
            return Err(Failure::Stopped);
        }
        let (bytes, _) = buffer_bytes(self.call, self.count, self.kind, rank, size);
        let mut source = vec![0; bytes];
        if bytes > 0 {
            communicator.driver.copy_out(self.of, &mut source, self.source)?;
        }
        let part = self.count * self.kind.bytes();
        let send =
            |peer, bytes| communicator.send(peer, Channel::Collective, self.number, self.message(bytes));
        match self.call {
            Call::Send { peer } => {
                communicator.send(peer, Channel::Send, self.number, self.message(&source))?
            }
            Call::Receive { .. } => {}
            Call::Reduce { root } => send(root, &source)?,
            Call::Broadcast { root } if rank != root => {}
            Call::ReduceScatter => {
                for peer in 0..size {
                    send(peer, &source[peer * part..(peer + 1) * part])?;
                }
            }
            Call::AllReduce | Call::AllGather | Call::Broadcast { .. } => {
                for peer in 0..size {
                    send(peer, &source)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the data of the other ranks, and stores the result.
    fn receive_all(&self) -> Result<(), Failure> {
        let communicator = &self.communicator;
        let everyone = 0..communicator.size;
        let result = match self.call {
            Call::Send { .. } => return Ok(()),
            Call::Reduce { root } if communicator.rank != root => return Ok(()),
            Call::Receive { peer } => self.receive(peer, Channel::Send)?,
            Call::Broadcast { root } => self.receive(root, Channel::Collective)?,
            Call::AllGather => {
                let parts: Result<Vec<_>, _> =
                    everyone.map(|peer| self.receive(peer, Channel::Collective)).collect();
                parts?.concat()
            }
            Call::AllReduce | Call::ReduceScatter | Call::Reduce { .. } => {
                let parts: Result<Vec<_>, _> =
                    everyone.map(|peer| self.receive(peer, Channel::Collective)).collect();
                reduce(self.kind, self.reduction, &parts?)
            }
        };
        if !result.is_empty() {
            communicator.driver.copy_in(self.of, self.target, &result)?;
        }
        if let Call::Receive { peer } = self.call {
            communicator.send(peer, Channel::Arrived, self.number, self.message(&[]))?;
        }
        Ok(())
    }

    /// Receives a rank's data. If the other rank made a different call, reports an error and waits for an abort,
    /// because the expected data will never arrive.
    fn receive(&self, peer: usize, channel: Channel) -> Result<Vec<u8>, Failure> {
        let message = self.communicator.receive((peer, channel, self.number))?;
        if message.signature != self.signature() {
            let why = format!("rank {peer} calls something else, or with other arguments, than {self}");
            self.communicator.fail(Error::INVALID_USAGE, &why);
            self.communicator.wait_for_abort();
            return Err(Failure::Stopped);
        }
        Ok(message.bytes)
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} elements of {:?}, number {}", self.name, self.count, self.kind, self.number)
    }
}
