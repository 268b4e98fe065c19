//! The order in which slots were last used, as a doubly linked list over indices. Every operation takes constant time.

/// Stands for the absence of a slot.
const NONE: u32 = u32::MAX;

/// The order of the slots that were [pushed](Recency::push) and not removed.
#[derive(Debug)]
pub struct Recency {
    links: Vec<Link>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    newer: u32,
    older: u32,
}

impl Default for Recency {
    fn default() -> Self {
        Self { links: Vec::new(), newest: NONE, oldest: NONE }
    }
}

impl Recency {
    /// Adds a slot as the newest. The order must not contain the slot yet.
    pub fn push(&mut self, slot: u32) {
        let index = slot as usize;
        if self.links.len() <= index {
            self.links.resize(index + 1, Link { newer: NONE, older: NONE });
        }
        self.links[index] = Link { newer: NONE, older: self.newest };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    /// Removes a slot, which the order must contain.
    pub fn remove(&mut self, slot: u32) {
        let Link { newer, older } = self.links[slot as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
    }

    /// Makes a slot the newest. The order must contain the slot.
    pub fn touch(&mut self, slot: u32) {
        self.remove(slot);
        self.push(slot);
    }

    /// The least recently used slot.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

#[cfg(test)]
mod tests;
