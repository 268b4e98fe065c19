//! Communicators: the sockets to the other ranks, the messages that have arrived, and the asynchronous error.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tutti_emulated_exports::{Driver, StreamContext};

use crate::id::{UniqueId, address};
use crate::rendezvous;
use crate::result::{Error, Outcome};

/// Purpose of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A rank's contribution to a collective.
    Collective = 1,
    /// The data of a send.
    Send = 2,
    /// The receiver's confirmation that a send has arrived.
    Arrived = 3,
}

/// Mode of a communicator's calls (`blocking` of `ncclConfig_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A call returns when it has done its work.
    Blocking,
    /// A call returns at once and continues in the background. The program may make no other call before
    /// `ncclCommGetAsyncError` has reported that the call has ended.
    NonBlocking,
}

/// Number of times that `ncclCommGetAsyncError` reports `ncclInProgress` for a call in the background. A program that
/// makes its next call without polling thus gets an error.
const BACKGROUND_LOOKS: u32 = 2;

/// Code of the last message of a rank that leaves without an error.
const GOODBYE: u64 = 4;

/// Key of a message: the sender's rank, the channel, and the operation's number.
pub type Key = (usize, Channel, u64);

/// A message. The receiver compares the message's signature with the signature of its own call.
#[derive(Debug)]
pub struct Message {
    /// Hash of the sender's call.
    pub signature: u64,
    /// Data of the message; empty for [`Channel::Arrived`].
    pub bytes: Vec<u8>,
}

/// The error of an operation that an abort of the communicator has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// Socket to another rank. Only the thread that holds the lock writes, so frames of several threads do not mix.
struct Link {
    stream: UnixStream,
    writing: Mutex<()>,
}

/// Numbers of operations so far: collectives, sends per peer, and receives per peer.
#[derive(Default)]
struct Numbers {
    collective: u64,
    sends: HashMap<usize, u64>,
    receives: HashMap<usize, u64>,
}

#[derive(Default)]
struct State {
    joining: bool,
    /// Number of `ncclCommGetAsyncError` calls until the call in the background counts as ended.
    background: u32,
    /// The rendezvous socket, and the name of this rank's listener. An abort shuts down the socket and connects to the
    /// listener, which wakes the joining thread.
    rendezvous: Option<(UnixStream, String)>,
    links: Vec<Option<Arc<Link>>>,
    error: Option<Error>,
    aborted: bool,
    messages: HashMap<Key, Message>,
    numbers: Numbers,
    /// Number of operations that have not ended.
    outstanding: usize,
}

/// A communicator.
pub struct Communicator {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Mode of the communicator's calls.
    pub mode: Mode,
    /// Context and device of the rank.
    pub of: StreamContext,
    /// The emulated driver of this process.
    pub driver: Driver,
    state: Mutex<State>,
    changed: Condvar,
}

impl Communicator {
    /// Starts a thread that joins a group.
    ///
    /// # Errors
    ///
    /// `INVALID_ARGUMENT` for a wrong id or a rank that is not below the size; `UNHANDLED_CUDA_ERROR` without a current
    /// context.
    pub fn join(
        driver: Driver,
        of: StreamContext,
        id: UniqueId,
        rank: usize,
        size: usize,
        mode: Mode,
    ) -> Outcome<Arc<Self>> {
        if rank >= size {
            return Err(Error::INVALID_ARGUMENT);
        }
        id.name()?;
        let state = State { joining: true, ..State::default() };
        let communicator = Arc::new(Communicator {
            rank,
            size,
            mode,
            of,
            driver,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        if driver.never_joins(of.device, "ncclCommInitRank") {
            eprintln!("emulated NCCL: rank {rank} of {size} never joins its group, on demand");
            return Ok(communicator);
        }
        let own = communicator.clone();
        std::thread::spawn(move || own.connect(&id));
        Ok(communicator)
    }

    fn connect(self: Arc<Self>, id: &UniqueId) {
        let opened = |root: &UnixStream, listener: &str| {
            let mut state = self.lock();
            if state.aborted {
                let _ = root.shutdown(Shutdown::Both);
            }
            state.rendezvous = root.try_clone().ok().map(|root| (root, listener.to_owned()));
        };
        let joined = rendezvous::join(id, self.rank, self.size, self.of.device, opened);
        let mut state = self.lock();
        state.joining = false;
        state.rendezvous = None;
        match joined {
            Ok(peers) if !state.aborted => {
                for (peer, stream) in peers.into_iter().enumerate() {
                    let reading = stream.as_ref().and_then(|stream| stream.try_clone().ok());
                    state.links.push(stream.map(|stream| Arc::new(Link { stream, writing: Mutex::new(()) })));
                    if let Some(reading) = reading {
                        let own = self.clone();
                        std::thread::spawn(move || own.read(peer, reading));
                    }
                }
            }
            Ok(_) => {}
            Err(error) => state.error = Some(error),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the group is complete.
    ///
    /// # Errors
    ///
    /// The error that kept the rank from joining.
    pub fn wait_until_joined(&self) -> Outcome {
        let mut state = self.lock();
        while state.joining && !state.aborted {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.error.map_or(Ok(()), Err)
    }

    /// Returns the asynchronous error, or `IN_PROGRESS` while the rank joins or a call continues in the background.
    pub fn error(&self) -> Option<Error> {
        let mut state = self.lock();
        if state.joining {
            return Some(Error::IN_PROGRESS);
        }
        if state.background > 0 && state.error.is_none() {
            state.background -= 1;
            return Some(Error::IN_PROGRESS);
        }
        state.error
    }

    /// If the communicator is non-blocking, marks the submitted calls as running in the background.
    ///
    /// # Errors
    ///
    /// `IN_PROGRESS` if the communicator is non-blocking.
    pub fn go_on(&self) -> Outcome {
        if self.mode == Mode::Blocking {
            return Ok(());
        }
        self.lock().background = BACKGROUND_LOOKS;
        Err(Error::IN_PROGRESS)
    }

    /// Checks that an operation may begin.
    ///
    /// # Errors
    ///
    /// The asynchronous error; `INVALID_USAGE` while the rank joins or after an abort; `INVALID_ARGUMENT` while another
    /// call continues in the background.
    pub fn check(&self) -> Outcome {
        let state = self.lock();
        if state.background > 0 && !state.aborted && state.error.is_none() {
            eprintln!("emulated NCCL: rank {} of {}: a call while another goes on", self.rank, self.size);
            return Err(Error::INVALID_ARGUMENT);
        }
        if state.joining || state.aborted {
            return Err(Error::INVALID_USAGE);
        }
        state.error.map_or(Ok(()), Err)
    }

    /// Returns the number of the next collective, and counts it as outstanding.
    pub fn next_collective(&self) -> u64 {
        let mut state = self.lock();
        state.outstanding += 1;
        state.numbers.collective += 1;
        state.numbers.collective
    }

    /// Returns the number of the next send to a rank, and counts it as outstanding.
    pub fn next_send(&self, peer: usize) -> u64 {
        let mut state = self.lock();
        state.outstanding += 1;
        let number = state.numbers.sends.entry(peer).or_default();
        *number += 1;
        *number
    }

    /// Returns the number of the next receive from a rank, and counts it as outstanding.
    pub fn next_receive(&self, peer: usize) -> u64 {
        let mut state = self.lock();
        state.outstanding += 1;
        let number = state.numbers.receives.entry(peer).or_default();
        *number += 1;
        *number
    }

    /// Records the end of an operation.
    pub fn end_operation(&self) {
        self.lock().outstanding -= 1;
        self.changed.notify_all();
    }

    /// Sends a message. If the peer is gone, the message is lost. The thread that reads from the peer then reports an
    /// error.
    ///
    /// # Errors
    ///
    /// [`Stopped`] after an abort.
    pub fn send(&self, peer: usize, channel: Channel, number: u64, message: Message) -> Result<(), Stopped> {
        if peer == self.rank {
            self.lock().messages.insert((peer, channel, number), message);
            self.changed.notify_all();
            return Ok(());
        }
        let link = {
            let state = self.lock();
            if state.aborted {
                return Err(Stopped);
            }
            state.links.get(peer).cloned().flatten()
        };
        let Some(link) = link else { return Ok(()) };
        let head = [channel as u64, number, message.signature, message.bytes.len() as u64];
        let _ = link.write(head, &message.bytes);
        Ok(())
    }

    /// Waits for a message. If the sender leaves before it sends the message, only an abort ends the wait.
    ///
    /// # Errors
    ///
    /// [`Stopped`] after an abort.
    pub fn receive(&self, key: Key) -> Result<Message, Stopped> {
        let mut state = self.lock();
        loop {
            if state.aborted {
                return Err(Stopped);
            }
            if let Some(message) = state.messages.remove(&key) {
                return Ok(message);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for an abort. An operation that can never end calls this method.
    pub fn wait_for_abort(&self) {
        let mut state = self.lock();
        while !state.aborted {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Prints an error, and makes it the asynchronous error if the communicator has none yet.
    pub fn fail(&self, error: Error, why: &str) {
        eprintln!("emulated NCCL: rank {} of {}: {why}", self.rank, self.size);
        self.lock().error.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Stops all operations and closes the sockets.
    pub fn abort(&self) {
        let (links, rendezvous) = {
            let mut state = self.lock();
            state.aborted = true;
            (std::mem::take(&mut state.links), state.rendezvous.take())
        };
        self.changed.notify_all();
        if let Some((root, listener)) = rendezvous {
            let _ = root.shutdown(Shutdown::Both);
            // Wakes the joining thread, which waits at the listener for connections.
            let _ = address(&listener).map(|address| UnixStream::connect_addr(&address));
        }
        for link in links.into_iter().flatten() {
            let _ = link.stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits for all operations, sends the goodbye message to the other ranks and closes the sockets.
    pub fn finish(&self) {
        let links = {
            let mut state = self.lock();
            while state.outstanding > 0 && !state.aborted && state.error.is_none() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.links.clone()
        };
        for link in links.into_iter().flatten() {
            let _ = link.write([GOODBYE, 0, 0, 0], &[]);
        }
        self.abort();
    }

    /// Receives messages from a peer until the peer closes its socket.
    fn read(&self, peer: usize, mut stream: UnixStream) {
        while let Ok((head, bytes)) = read_frame(&mut stream) {
            let channel = match head[0] {
                1 => Channel::Collective,
                2 => Channel::Send,
                3 => Channel::Arrived,
                // A goodbye is not an error. A receive of a message that the peer never sent waits until an abort.
                _ => return,
            };
            let message = Message { signature: head[2], bytes };
            self.lock().messages.insert((peer, channel, head[1]), message);
            self.changed.notify_all();
        }
        let silent = std::env::var("EMULATED_NCCL_NOTICE").is_ok_and(|notice| notice == "0");
        if !silent && !self.lock().aborted {
            self.fail(Error::REMOTE_ERROR, &format!("rank {peer} is gone"));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn write(&self, head: [u64; 4], bytes: &[u8]) -> std::io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let head: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&self.stream).write_all(&head)?;
        (&self.stream).write_all(bytes)
    }
}

fn read_frame(stream: &mut UnixStream) -> std::io::Result<([u64; 4], Vec<u8>)> {
    let mut head = [0; 4];
    for word in &mut head {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *word = u64::from_ne_bytes(bytes);
    }
    let mut bytes = vec![0; head[3] as usize];
    stream.read_exact(&mut bytes)?;
    Ok((head, bytes))
}
