//! Attention over a window of recent tokens and over compressed entries, and the compressors that make the entries.
//!
//! A request's window is a ring of keys in its slot, its compressors' open states are in the slot, too, and its entries
//! are in its pages. The order of all sums depends on absolute positions alone: a compressor adds one token after
//! another, and attention takes the sink, the window's keys and then the entries in order of position. So chunks, other
//! rows and threads change no bit.

mod attention;
mod choice;
mod compress;
mod heads;
mod keys;
mod tails;
mod window;

pub(super) use self::attention::{EntrySource, Operands, window_attention};
pub(super) use self::choice::IndexerOperands;
pub(super) use self::compress::{Compressor, compress};
pub(super) use self::keys::{Ring, WindowKeys};
pub(super) use self::tails::{Tails, TailsNorm, rotate_tails};
pub(super) use self::window::store_window;
use crate::cpu::memory::Buffer;

/// Memory that the operations reuse from call to call. It grows to what the largest step so far needed.
#[derive(Default)]
pub(super) struct Scratch {
    /// Working memory of each thread.
    floats: Option<Buffer<f32>>,
    choices: choice::Choices,
    /// The tokens of the step that have a slot.
    tokens: Vec<attention::Token>,
    /// The windows that the step's tokens close.
    windows: Vec<compress::Window>,
}

impl Scratch {
    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        let Self { floats, choices, tokens, windows } = self;
        floats.as_ref().map_or(0, |floats| floats.len() * size_of::<f32>())
            + choices.bytes()
            + tokens.capacity() * size_of::<attention::Token>()
            + windows.capacity() * size_of::<compress::Window>()
    }
}
