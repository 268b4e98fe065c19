//! A model of a device's paged planes. It detects a page that was shared, moved or freed wrongly when the page is read.

use std::ops::Range;

use tutti_scheduler::PageId;

/// A stand-in for the state of a model: for each position, a hash of all tokens up to and including the position.
pub type History = Vec<u64>;

/// Appends a token to a history.
pub fn remember(history: &mut History, token: u32) {
    let before = history.last().copied().unwrap_or(7);
    let mixed = (before ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    history.push(mixed ^ (mixed >> 29));
}

/// The content of an entry that was never written, or whose row failed or did not finish.
const GARBAGE: u64 = 0xBAD;

/// The paged planes of a device. All planes have the same pages. A page has one entry of a plane per `ratio` positions.
pub struct Pages {
    page_tokens: usize,
    planes: Vec<Plane>,
}

struct Plane {
    ratio: usize,
    entries: Vec<u64>,
}

impl Plane {
    /// An entry covers `ratio` positions. Returns the index of the entry whose last position is `position`, or `None`
    /// if there is no such entry.
    fn entry(&self, page_tokens: usize, table: &[PageId], position: usize) -> Option<usize> {
        let completes = (position + 1).is_multiple_of(self.ratio);
        let page = completes.then(|| table[position / page_tokens].0 as usize)?;
        Some(page * (page_tokens / self.ratio) + position % page_tokens / self.ratio)
    }
}

impl Pages {
    pub fn new(pages: usize, page_tokens: usize, ratios: &[u32]) -> Self {
        let plane = |ratio: &u32| {
            let ratio = *ratio as usize;
            Plane { ratio, entries: vec![GARBAGE; pages * page_tokens / ratio] }
        };
        Self { page_tokens, planes: ratios.iter().map(plane).collect() }
    }

    /// The first position whose entry differs from the history, if there is one.
    pub fn first_difference(&self, table: &[PageId], history: &[u64]) -> Option<usize> {
        let differs = |plane: &Plane| {
            history.iter().enumerate().find_map(|(position, value)| {
                let entry = plane.entry(self.page_tokens, table, position)?;
                (plane.entries[entry] != *value).then_some(position)
            })
        };
        self.planes.iter().find_map(differs)
    }

    /// Writes the entries whose last position is among these positions. Writes their values if `sound` is true, else
    /// garbage.
    pub fn write(&mut self, table: &[PageId], positions: Range<usize>, history: &[u64], sound: bool) {
        for plane in &mut self.planes {
            for position in positions.clone() {
                if let Some(entry) = plane.entry(self.page_tokens, table, position) {
                    plane.entries[entry] = if sound { history[position] } else { GARBAGE };
                }
            }
        }
    }
}
