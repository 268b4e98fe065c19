//! Checksums by which a receiver notices bytes that changed between the sender's memory and its own.
//!
//! TCP's checksum misses about one error in 65,536, plaintext has no other, and shared memory has none. XXH3 with 64
//! bits costs a small part of one copy of the bytes. It protects from faults, not from attackers: the secret of a
//! reservation keeps those out.

use prost::Message;
use tutti_proto::cluster::v1::{self as pb, plane_data::Place, plane_piece::Piece};
use twox_hash::XxHash3_64;

/// Returns the checksum of consecutive units. It covers their kind and place in the request, too.
pub fn of_units(kind: u32, first: u32, count: u32, bytes: &[u8]) -> u64 {
    let seed = u64::from(kind) << 63 ^ u64::from(first) << 32 ^ u64::from(count);
    XxHash3_64::oneshot_with_seed(seed, bytes)
}

/// Sets the checksum of a piece, but for units in shared memory, whose bytes it does not hold.
pub fn seal(piece: Piece) -> Piece {
    match piece {
        Piece::Manifest(manifest) => Piece::Manifest(manifest.sealed()),
        Piece::HandOver(hand_over) => Piece::HandOver(hand_over.sealed()),
        Piece::Data(mut data) => {
            if let Some(Place::Inline(bytes)) = &data.place {
                data.checksum = of_units(data.kind, data.first, data.count, bytes);
            }
            Piece::Data(data)
        }
        // No field of a renewal can change.
        Piece::Renewal(renewal) => Piece::Renewal(renewal),
    }
}

/// A message of a push that holds a checksum of itself.
pub trait Checked: Message + Clone {
    /// The field of the checksum.
    fn checksum(&mut self) -> &mut u64;

    /// Sets the checksum.
    fn sealed(mut self) -> Self {
        *self.checksum() = 0;
        *self.checksum() = XxHash3_64::oneshot(&self.encode_to_vec());
        self
    }

    /// True if the checksum is that of the message.
    fn is_sound(&self) -> bool {
        *self.clone().checksum() == *self.clone().sealed().checksum()
    }
}

impl Checked for pb::TransferManifest {
    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }
}

impl Checked for pb::HandOver {
    fn checksum(&mut self) -> &mut u64 {
        &mut self.checksum
    }
}

#[cfg(test)]
mod tests;
