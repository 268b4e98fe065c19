//! The settings of a simulated device: what a step costs, and what goes wrong. Conductor and workers share them.

use serde::{Deserialize, Serialize};

use crate::Error;

/// A simulated device. Every number that is not given is the profile's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SimSettings {
    /// Where the costs come from.
    pub profile: SimProfile,
    /// Microseconds of each step, whatever is in it.
    pub fixed_us: Option<u32>,
    /// Nanoseconds of each token of a prefill row.
    pub prefill_ns_per_token: Option<u32>,
    /// Nanoseconds of each token that a prefill row's token attends to: grows with the square of a prompt.
    pub prefill_ns_per_attended_token: Option<u32>,
    /// Nanoseconds of each decode row.
    pub decode_ns_per_row: Option<u32>,
    /// Nanoseconds of each token that a decode row attends to.
    pub decode_ns_per_attended_token: Option<u32>,
    /// How much longer a step may randomly take, in percent.
    pub jitter_percent: u32,
    /// Of the jitter. Tokens do not depend on it.
    pub seed: u64,
    /// Every so many steps, the device refuses the step.
    pub fail_every: Option<u64>,
    /// The device refuses each step that has this token in it, as if one request's data brought it down.
    pub fail_on_token: Option<u32>,
    /// The device is lost in the step after so many, and with it the worker.
    pub lose_after: Option<u64>,
    /// The device never finishes the step after so many.
    pub hang_after: Option<u64>,
}

/// Costs of a known kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SimProfile {
    /// An H200 under a dense model of 8 billion parameters in bf16. Not measured, but counted from data sheets: reading
    /// 16.4 GB of weights and 147 KB of keys and values a token at 80 % of 4.8 TB/s, 16.4 GFLOP a token at 60 % and
    /// attention at 50 % of 989 TFLOP/s.
    #[default]
    H200,
    /// Steps that take no time: what is left is the cost of everything around the device.
    Instant,
}

/// What a step costs; see [`SimSettings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimCosts {
    /// As in the settings.
    pub fixed_us: u32,
    /// As in the settings.
    pub prefill_ns_per_token: u32,
    /// As in the settings.
    pub prefill_ns_per_attended_token: u32,
    /// As in the settings.
    pub decode_ns_per_row: u32,
    /// As in the settings.
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
    /// The profile's costs with what was given over them.
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

    /// Refuses what could never serve.
    pub fn validate(&self) -> Result<(), Error> {
        if self.jitter_percent > 1000 {
            let message = format!("is {}, the limit is 1000", self.jitter_percent);
            return Err(Error::invalid("sim.jitter_percent", message));
        }
        if self.fail_every.is_some_and(|every| every < 2) {
            return Err(Error::invalid("sim.fail_every", "is below 2: every step would fail"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_goes_over_the_profile() {
        let settings = SimSettings { fixed_us: Some(7), ..SimSettings::default() };
        assert_eq!(settings.costs(), SimCosts { fixed_us: 7, ..SimProfile::H200.costs() });
    }

    #[test]
    fn settings_under_which_nothing_runs_are_refused_by_name() {
        let every = SimSettings { fail_every: Some(1), ..SimSettings::default() };
        assert_eq!(every.validate().unwrap_err().field(), Some("sim.fail_every"));
        let jitter = SimSettings { jitter_percent: 1001, ..SimSettings::default() };
        assert_eq!(jitter.validate().unwrap_err().field(), Some("sim.jitter_percent"));
    }
}
