//! Which device the workers run on.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A device of this build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The best one that this machine has.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// None: a cost model that takes a device's time and gives tokens of no meaning.
    Sim,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "sim" => Ok(Self::Sim),
            other => Err(format!("this build has no device {other:?}; it has auto, cpu, sim")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Sim => "sim",
        })
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> Self {
        device.to_string()
    }
}
