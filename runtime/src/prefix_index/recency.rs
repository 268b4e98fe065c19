//! An order of slots by how recently each was used: a doubly linked list over indices, every operation O(1).

/// No slot.
const NONE: u32 = u32::MAX;

/// The order of those slots that were [`Recency::push`]ed and not removed.
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
    /// Takes in a slot as the newest. It must not be in the order.
    pub fn push(&mut self, slot: u32) {
        let place = slot as usize;
        if self.links.len() <= place {
            self.links.resize(place + 1, Link { newer: NONE, older: NONE });
        }
        self.links[place] = Link { newer: NONE, older: self.newest };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    /// Takes out a slot that is in the order.
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

    /// Makes a slot that is in the order its newest.
    pub fn touch(&mut self, slot: u32) {
        self.remove(slot);
        self.push(slot);
    }

    /// The slot that was used longest ago.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_queue_whose_members_can_go_to_its_end(
            steps in prop::collection::vec((0u32..8, any::<bool>()), 0..80),
        ) {
            let (mut order, mut model) = (Recency::default(), VecDeque::new());
            for (slot, remove) in steps {
                let place = model.iter().position(|s| *s == slot);
                match (place, remove) {
                    (None, true) => {}
                    (None, false) => order.push(slot),
                    (Some(_), true) => order.remove(slot),
                    (Some(_), false) => order.touch(slot),
                }
                model.retain(|s| *s != slot);
                if !remove {
                    model.push_back(slot);
                }
                prop_assert_eq!(order.oldest(), model.front().copied());
            }
            while let Some(slot) = model.pop_front() {
                prop_assert_eq!(order.oldest(), Some(slot));
                order.remove(slot);
            }
            prop_assert_eq!(order.oldest(), None);
        }
    }
}
