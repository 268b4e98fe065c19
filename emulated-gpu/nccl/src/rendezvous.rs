//! Rendezvous: once all ranks have connected to the process that made the id, this process sends the names of all
//! ranks' listeners to each rank.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use crate::id::{UniqueId, address, unused_name};
use crate::result::{Error, Outcome};

/// Longest name that a rank may send, in bytes.
const LONGEST: u32 = 128;

fn write_text(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(&(text.len() as u32).to_ne_bytes())?;
    to.write_all(text.as_bytes())
}

fn read_number(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn read_text(from: &mut impl Read) -> io::Result<String> {
    let length = read_number(from)?;
    if length > LONGEST {
        return Err(io::Error::other(format!("a name of {length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// Makes an id, and starts a thread that waits for the ranks.
///
/// # Errors
///
/// `SYSTEM_ERROR` if no socket can be opened.
pub fn open() -> Outcome<UniqueId> {
    let name = unused_name();
    let listener = UnixListener::bind_addr(&address(&name)?).map_err(|_| Error::SYSTEM_ERROR)?;
    std::thread::spawn(move || {
        // If a rank's connection breaks, the others keep waiting, as with NCCL.
        let _ = introduce(&listener);
    });
    Ok(UniqueId::new(&name))
}

/// A rank that has connected: its socket, the name of its listener, and its device.
type Waiting = (UnixStream, (String, u32));

/// Waits for all ranks, and sends all listeners' names to each rank. If two ranks use the same device, sends empty
/// names instead, because NCCL refuses such a group.
fn introduce(listener: &UnixListener) -> io::Result<()> {
    let mut ranks: Vec<Option<Waiting>> = Vec::new();
    while ranks.is_empty() || ranks.iter().any(Option::is_none) {
        let (mut stream, _) = listener.accept()?;
        let (rank, size) = (read_number(&mut stream)? as usize, read_number(&mut stream)? as usize);
        let (device, name) = (read_number(&mut stream)?, read_text(&mut stream)?);
        if ranks.is_empty() {
            ranks.resize_with(size, || None);
        }
        if size != ranks.len() || ranks.get(rank).is_none_or(Option::is_some) {
            eprintln!("emulated NCCL: rank {rank} of {size} does not fit into a group of {}", ranks.len());
            continue;
        }
        ranks[rank] = Some((stream, (name, device)));
    }
    let (mut streams, hosts): (Vec<UnixStream>, Vec<(String, u32)>) = ranks.into_iter().flatten().unzip();
    let shared = hosts
        .iter()
        .enumerate()
        .any(|(rank, (_, device))| hosts[..rank].iter().any(|(_, other)| other == device));
    if shared {
        eprintln!("emulated NCCL: two ranks of a group are on one device: {hosts:?}");
    }
    // Rank 0 gets the names last. Rank 0 usually made the id, and this thread ends when that process ends.
    for stream in streams.iter_mut().rev() {
        for (name, _) in &hosts {
            write_text(stream, if shared { "" } else { name })?;
        }
    }
    Ok(())
}

/// Connects a rank with all others. Passes the rendezvous socket and the name of this rank's listener to `opened`. An
/// abort shuts down the socket and connects to the listener, which makes this function return.
///
/// # Errors
///
/// `REMOTE_ERROR` if the rendezvous or a rank is gone, `INVALID_USAGE` if two ranks are on one device, `SYSTEM_ERROR`
/// if no socket can be opened.
pub fn join(
    id: &UniqueId,
    rank: usize,
    size: usize,
    device: u32,
    opened: impl Fn(&UnixStream, &str),
) -> Outcome<Vec<Option<UnixStream>>> {
    let own = unused_name();
    let listener = UnixListener::bind_addr(&address(&own)?).map_err(|_| Error::SYSTEM_ERROR)?;
    let root = UnixStream::connect_addr(&address(id.name()?)?).map_err(|_| Error::REMOTE_ERROR)?;
    opened(&root, &own);
    connect(root, &listener, &own, [rank as u32, size as u32, device]).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Error::INVALID_USAGE,
        _ => Error::REMOTE_ERROR,
    })
}

fn connect(
    mut root: UnixStream,
    listener: &UnixListener,
    own: &str,
    identity: [u32; 3],
) -> io::Result<Vec<Option<UnixStream>>> {
    let (rank, size) = (identity[0] as usize, identity[1] as usize);
    root.write_all(&identity.map(u32::to_ne_bytes).concat())?;
    write_text(&mut root, own)?;
    let names: Vec<String> = (0..size).map(|_| read_text(&mut root)).collect::<io::Result<_>>()?;
    if names.iter().any(String::is_empty) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut peers: Vec<Option<UnixStream>> = (0..size).map(|_| None).collect();
    for (peer, name) in names.iter().enumerate().take(rank) {
        let address = address(name).map_err(|_| io::Error::other("a name that is no socket's"))?;
        let mut stream = UnixStream::connect_addr(&address)?;
        stream.write_all(&(rank as u32).to_ne_bytes())?;
        peers[peer] = Some(stream);
    }
    while peers.iter().enumerate().any(|(peer, stream)| peer != rank && stream.is_none()) {
        let (mut stream, _) = listener.accept()?;
        let peer = read_number(&mut stream)? as usize;
        match peers.get_mut(peer) {
            Some(free @ None) if peer > rank => *free = Some(stream),
            _ => return Err(io::Error::other(format!("rank {peer} connects to rank {rank}"))),
        }
    }
    Ok(peers)
}
