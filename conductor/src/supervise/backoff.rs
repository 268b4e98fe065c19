//! How long to wait before a worker is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);
/// A worker that lived this long was well: its next failure is a first one.
pub const WELL: Duration = Duration::from_secs(10);

/// Doubles with each short life, up to a bound.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    early_exits: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST, early_exits: 0 }
    }
}

impl Backoff {
    /// The pause after a worker that lived for `life`.
    pub fn after(&mut self, life: Duration) -> Duration {
        if life >= WELL {
            *self = Self::default();
        }
        self.early_exits += u32::from(life < WELL);
        let pause = self.next;
        self.next = (self.next * 2).min(LONGEST);
        pause
    }

    /// How many lives in a row were short.
    pub fn early_exits(&self) -> u32 {
        self.early_exits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lives_wait_longer_up_to_a_bound_and_a_long_one_starts_over() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..9).map(|_| backoff.after(Duration::ZERO)).collect();
        assert_eq!(pauses[..3], [FIRST, FIRST * 2, FIRST * 4]);
        assert_eq!(pauses[8], LONGEST);
        assert_eq!(backoff.early_exits(), 9);
        assert_eq!(backoff.after(WELL), FIRST);
        assert_eq!(backoff.early_exits(), 0);
    }
}
