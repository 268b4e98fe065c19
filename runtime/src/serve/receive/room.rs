//! Room in bytes for the messages that arrive at one listener.
//!
//! Strangers, which are callers without a credential, have a separate part of the room, so that they delay no known
//! caller. No single address can take all of a part.

use std::{collections::HashMap, net::IpAddr};

use parking_lot::Mutex;

use crate::{
    Error, ErrorKind,
    serve::{open::network, standing::Standing, stream::Peer},
};

/// A listener's strangers have one in this many bytes of its room.
const STRANGERS_SHARE: usize = 4;
/// The messages of known callers at one address have at most one in this many bytes of the whole room.
const KNOWN_PEERS: usize = 2;
/// The messages of strangers at one address have at most one in this many bytes of the strangers' room. Strangers'
/// calls, such as probes, have short messages.
const STRANGE_PEERS: usize = 4;

/// Room of one listener.
#[derive(Debug)]
pub(in crate::serve) struct Room {
    known: Share,
    strangers: Share,
}

/// The room of known callers, or the room of strangers.
#[derive(Debug)]
struct Share {
    whose: &'static str,
    bytes: usize,
    per_peer: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// The caller that sends a message.
#[derive(Debug)]
pub(in crate::serve) struct Caller {
    /// `None` over a Unix socket: such a caller belongs to this user and has no bound per address.
    network: Option<IpAddr>,
    standing: Standing,
}

impl Caller {
    pub fn new(peer: Peer, standing: Standing) -> Self {
        Self { network: network(peer), standing }
    }
}

/// Bytes of room that one message has taken. Must be returned with [`Room::give_back`].
#[derive(Debug, Default)]
pub(super) struct Taken {
    known: usize,
    strange: usize,
}

impl Room {
    /// Room of this many bytes. If known callers are trusted, their messages have no bound.
    pub fn new(bytes: usize, are_callers_trusted: bool) -> Self {
        let of_strangers = bytes / STRANGERS_SHARE;
        let of_known = if are_callers_trusted { usize::MAX } else { bytes - of_strangers };
        let per_known = if are_callers_trusted { usize::MAX } else { bytes / KNOWN_PEERS };
        Self {
            known: Share::new("messages", of_known, per_known),
            strangers: Share::new(
                "messages of callers without a credential",
                of_strangers,
                of_strangers / STRANGE_PEERS,
            ),
        }
    }

    /// Takes room for more bytes of a message.
    pub(super) fn take(&self, caller: &Caller, taken: &mut Taken, bytes: usize) -> Result<(), Error> {
        if caller.standing.is_known() {
            self.known.take(caller.network, bytes)?;
            taken.known += bytes;
        } else {
            self.strangers.take(caller.network, bytes)?;
            taken.strange += bytes;
        }
        Ok(())
    }

    /// Returns all room of a message.
    pub(super) fn give_back(&self, caller: &Caller, taken: &mut Taken) {
        let Taken { known, strange } = std::mem::take(taken);
        self.known.give_back(caller.network, known);
        self.strangers.give_back(caller.network, strange);
    }

    /// Bytes that all messages have taken.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.known.held.lock().bytes + self.strangers.held.lock().bytes
    }
}

impl Share {
    fn new(whose: &'static str, bytes: usize, per_peer: usize) -> Self {
        Self { whose, bytes, per_peer, held: Mutex::default() }
    }

    fn take(&self, peer: Option<IpAddr>, bytes: usize) -> Result<(), Error> {
        let mut held = self.held.lock();
        let of_peer = peer.map_or(0, |peer| held.by_peer.get(&peer).copied().unwrap_or_default());
        let whose = self.whose;
        let refuse = |from: &str, held: usize, room: usize| {
            let message =
                format!("{held} bytes of {whose}{from} are arriving, the limit is {room}; try again later");
            Err(Error::new(ErrorKind::Overloaded, message))
        };
        if held.bytes.saturating_add(bytes) > self.bytes {
            return refuse("", held.bytes, self.bytes);
        }
        if of_peer.saturating_add(bytes) > self.per_peer {
            return refuse(" from one address", of_peer, self.per_peer);
        }
        held.bytes += bytes;
        if let Some(peer) = peer {
            held.by_peer.insert(peer, of_peer + bytes);
        }
        Ok(())
    }

    fn give_back(&self, peer: Option<IpAddr>, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut held = self.held.lock();
        held.bytes -= bytes;
        if let Some(peer) = peer
            && let Some(of_peer) = held.by_peer.get_mut(&peer)
        {
            *of_peer -= bytes;
            if *of_peer == 0 {
                held.by_peer.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests;
