//! A budget of HTTP/2 frames that carry neither requests nor their bodies.
//!
//! `h2` bounds resets, headers and stored data, but reads any number of PRIORITY, WINDOW_UPDATE, PING, SETTINGS, empty
//! DATA and unknown frames. Each costs the peer nine bytes, and this process the work of a frame. A peer that reads a
//! response needs such frames in proportion to the bytes written to it, so each write adds to the budget.

use std::time::Instant;

/// The first bytes of an HTTP/2 client (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame's header: length (3), type (1), flags (1) and stream (4); see section 4.1.
const HEADER: usize = 9;
/// Types of frames that carry requests and their bodies.
const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// Budget of a new connection, and the budget's maximum, in frames.
const BURST: f64 = 20_000.0;
/// Frames that the budget gains per second.
const PER_SECOND: f64 = 1_000.0;
/// Written bytes that add one frame to the budget. The answers to PING and SETTINGS are shorter, so that a peer gains
/// no budget by sending these frames.
const BYTES_PER_FRAME: f64 = 20.0;

/// The frame budget of one connection.
#[derive(Debug)]
pub(super) struct FrameBudget {
    position: Position,
    left: f64,
    since: Instant,
}

/// The position in the bytes that a peer sends.
#[derive(Debug)]
enum Position {
    /// In the preface, with the number of its bytes that have arrived.
    Preface(usize),
    /// The peer speaks HTTP/1.
    Http1,
    /// In a frame's header, with its bytes and the number of them that have arrived.
    Header([u8; HEADER], usize),
    /// In a frame's payload, with the number of its bytes that have not arrived.
    Payload(usize),
}

impl FrameBudget {
    pub fn new() -> Self {
        Self { position: Position::Preface(0), left: BURST, since: Instant::now() }
    }

    /// Adds bytes that were written to the peer to the budget.
    pub fn written(&mut self, bytes: usize) {
        self.left = (self.left + bytes as f64 / BYTES_PER_FRAME).min(BURST);
    }

    /// Parses bytes that the peer has sent. Returns false once the budget is used up.
    pub fn read(&mut self, mut bytes: &[u8]) -> bool {
        let before = self.left;
        while !bytes.is_empty() {
            match &mut self.position {
                Position::Http1 => return true,
                Position::Preface(known) => {
                    let count = bytes.len().min(PREFACE.len() - *known);
                    if bytes[..count] != PREFACE[*known..][..count] {
                        self.position = Position::Http1;
                        return true;
                    }
                    *known += count;
                    bytes = &bytes[count..];
                    if *known == PREFACE.len() {
                        self.position = Position::Header([0; HEADER], 0);
                    }
                }
                Position::Header(header, known) => {
                    let count = bytes.len().min(HEADER - *known);
                    header[*known..][..count].copy_from_slice(&bytes[..count]);
                    *known += count;
                    bytes = &bytes[count..];
                    if *known == HEADER {
                        let [a, b, c, kind, flags, ..] = *header;
                        let length = u32::from_be_bytes([0, a, b, c]) as usize;
                        if !is_paid(kind, flags, length) {
                            self.left -= 1.0;
                        }
                        self.position = Position::of_payload(length);
                    }
                }
                Position::Payload(rest) => {
                    let count = bytes.len().min(*rest);
                    bytes = &bytes[count..];
                    self.position = Position::of_payload(*rest - count);
                }
            }
        }
        if self.left < before {
            let now = Instant::now();
            let passed = now.saturating_duration_since(self.since).as_secs_f64();
            self.left = (self.left + passed * PER_SECOND).min(BURST);
            self.since = now;
        }
        self.left >= 0.0
    }
}

impl Position {
    fn of_payload(length: usize) -> Self {
        if length == 0 { Self::Header([0; HEADER], 0) } else { Self::Payload(length) }
    }
}

/// True if the frame begins a request, or carries or ends a body.
fn is_paid(kind: u8, flags: u8, length: usize) -> bool {
    kind == HEADERS || kind == DATA && (length > 0 || flags & 1 == 1)
}

#[cfg(test)]
mod tests;
