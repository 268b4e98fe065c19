//! A queue that divides work fairly among shares: deficit round robin (Shreedhar and Varghese, 1995). Each API key has
//! its own share.
//!
//! Each turn adds one quantum of cost to a share's credit (its deficit), and the share's items run while the credit
//! covers their cost. So a share's next item waits for at most one quantum and one item of each other share, however
//! many items those shares have. Items of one share keep their order.

use std::collections::VecDeque;

use crate::keys::Share;

/// The waiting items, by share.
#[derive(Debug)]
pub struct FairQueue<T> {
    quantum: u64,
    /// The shares that have items, in the order of their turns.
    turns: VecDeque<Line<T>>,
}

/// The items of one share.
#[derive(Debug)]
struct Line<T> {
    share: Share,
    /// Cost that the share's items may still use in this turn.
    deficit: u64,
    /// The items, with their costs.
    items: VecDeque<(u64, T)>,
}

impl<T> FairQueue<T> {
    /// Creates an empty queue. `quantum` is the cost that each turn adds to a share's credit.
    pub fn new(quantum: u64) -> Self {
        Self { quantum: quantum.max(1), turns: VecDeque::new() }
    }

    /// Adds an item behind the other items of its share.
    pub fn push(&mut self, share: Share, cost: u64, item: T) {
        match self.turns.iter_mut().find(|line| line.share == share) {
            Some(line) => line.items.push_back((cost, item)),
            None => {
                let items = VecDeque::from([(cost, item)]);
                self.turns.push_back(Line { share, deficit: self.quantum, items });
            }
        }
    }

    /// Takes the next item; `None` if the queue is empty.
    pub fn pop(&mut self) -> Option<T> {
        loop {
            let is_alone = self.turns.len() == 1;
            let line = self.turns.front_mut()?;
            let &(cost, _) = line.items.front()?;
            if is_alone || cost <= line.deficit {
                line.deficit = line.deficit.saturating_sub(cost);
                let (_, item) = line.items.pop_front()?;
                // A share without waiting items loses its unused credit.
                if line.items.is_empty() {
                    self.turns.pop_front();
                }
                return Some(item);
            }
            line.deficit += self.quantum;
            self.turns.rotate_left(1);
        }
    }
}

#[cfg(test)]
mod tests;
