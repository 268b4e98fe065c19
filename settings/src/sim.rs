//! The settings of the simulated device: the costs of a step, and faults. The device itself is
//! `worker/models/src/sim_device.rs`.

use std::path::PathBuf;

use crate::{Invalid, Settings};

settings! {
    /// The simulated device. Costs that are not given are the profile's.
    pub struct SimSettings, table "sim", errors "sim." {
        "Simulated device" => {
            /// Source of the costs.
            profile: SimProfile = SimProfile::H200;
            /// Cost of each step, whatever it holds.
            fixed_us: Option<u32> = None, unit "MICROSECONDS", default "the profile's";
            /// Cost of each token of a prefill row.
            prefill_ns_per_token: Option<u32> = None, unit "NANOSECONDS", default "the profile's";
            /// Cost of each pair of a prefill row's token and a token that it attends to: grows with the square of a
            /// prompt.
            prefill_ns_per_attended_token: Option<u32> = None, unit "NANOSECONDS", default "the profile's";
            /// Cost of each decode row.
            decode_ns_per_row: Option<u32> = None, unit "NANOSECONDS", default "the profile's";
            /// Cost of each token that a decode row attends to.
            decode_ns_per_attended_token: Option<u32> = None, unit "NANOSECONDS", default "the profile's";
            /// Maximum number of steps that the device holds: more than 1 let the host plan and enqueue a step while
            /// the device computes another one.
            steps_in_flight: usize = 1, unit "STEPS", at least 1, at most 8;
            /// Keep a running state of each request in a slot, as recurrent models do. Tokens do not depend on it.
            state: bool = false;
            /// Number of tokens that an entry in pages stands for, as in models with compressed attention. Tokens do
            /// not depend on it. More than 1 needs `state`. A divisor of the tokens of a page, which are 16.
            entry_tokens: usize = 1, unit "TOKENS", at least 1, at most 16;
            /// Time from the end of a step until the host learns of it.
            late_us: u32 = 0, unit "MICROSECONDS", at most 1_000_000;
            /// Random extra time of a step, at most this share of its cost.
            jitter_percent: u32 = 0, unit "PERCENT", at most 1000;
            /// Seed of the jitter. Tokens do not depend on it.
            seed: u64 = 0, unit "N";
            /// Period of refused steps: 10 means that the device refuses every tenth step.
            fail_every: Option<u64> = None, unit "STEPS";
            /// Token id: the device refuses each step that holds it, as if one request's data brought the step down.
            fail_on_token: Option<u32> = None, unit "TOKEN_ID";
            /// Number of steps after which the device is lost, and its worker ends.
            lose_after: Option<u64> = None, unit "STEPS";
            /// Number of steps after which a step never finishes.
            hang_after: Option<u64> = None, unit "STEPS";
            /// File that slows workers while it exists: each line names a rank and the number of times that its steps
            /// take as long. It is read before each step.
            slow_file: Option<PathBuf> = None, unit "FILE";
        }
    }
}

choices! {
    /// Costs of a known kind of device.
    pub enum SimProfile {
        /// An H200 with a dense model of 8 billion parameters in bf16. The costs are counted from data sheets, not
        /// measured: reading 16.4 GB of weights and 147 KB of keys and values per token at 80 % of 4.8 TB/s, 16.4 GFLOP
        /// per token at 60 %, and attention at 50 % of 989 TFLOP/s.
        H200 = "h200",
        /// Steps that take no time. A measurement then shows the costs of everything but the device.
        Instant = "instant",
    }
}

/// Costs of a step. A cost without a setting has the profile's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimCosts {
    /// Microseconds per step.
    pub fixed_us: u32,
    /// Nanoseconds per token of a prefill row.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds per pair of a prefill token and a token that it attends to.
    pub prefill_ns_per_attended_token: u32,
    /// Nanoseconds per decode row.
    pub decode_ns_per_row: u32,
    /// Nanoseconds per token that a decode row attends to.
    pub decode_ns_per_attended_token: u32,
}

impl SimProfile {
    fn costs(self) -> SimCosts {
        match self {
            Self::H200 => SimCosts {
                fixed_us: 4_300,
                prefill_ns_per_token: 27_600,
                prefill_ns_per_attended_token: 1,
                decode_ns_per_row: 5_000,
                decode_ns_per_attended_token: 38,
            },
            Self::Instant => SimCosts {
                fixed_us: 0,
                prefill_ns_per_token: 0,
                prefill_ns_per_attended_token: 0,
                decode_ns_per_row: 0,
                decode_ns_per_attended_token: 0,
            },
        }
    }
}

impl SimSettings {
    /// The costs that are set, and the profile's costs for all others.
    pub fn costs(&self) -> SimCosts {
        let profile = self.profile.costs();
        SimCosts {
            fixed_us: self.fixed_us.unwrap_or(profile.fixed_us),
            prefill_ns_per_token: self.prefill_ns_per_token.unwrap_or(profile.prefill_ns_per_token),
            prefill_ns_per_attended_token: self
                .prefill_ns_per_attended_token
                .unwrap_or(profile.prefill_ns_per_attended_token),
            decode_ns_per_row: self.decode_ns_per_row.unwrap_or(profile.decode_ns_per_row),
            decode_ns_per_attended_token: self
                .decode_ns_per_attended_token
                .unwrap_or(profile.decode_ns_per_attended_token),
        }
    }

    /// Refuses values outside of their ranges, a `fail_every` of 1, with which every step would fail, and entries of
    /// several tokens that do not fill a page or have no slot for their open tokens.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        if self.fail_every.is_some_and(|every| every < 2) {
            return Err(Invalid::new("sim.fail_every", "is below 2: every step would fail"));
        }
        if !self.entry_tokens.is_power_of_two() {
            return Err(Invalid::new(
                "sim.entry_tokens",
                format!("is {}, no power of two", self.entry_tokens),
            ));
        }
        if self.entry_tokens > 1 && !self.state {
            return Err(Invalid::new("sim.entry_tokens", "is above 1 without sim.state"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
