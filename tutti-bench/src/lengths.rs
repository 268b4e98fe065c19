//! Distributions of prompt and output lengths.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

use crate::random::Draw;

/// Maximum length that a distribution may have.
const MAX: u32 = 10_000_000;

/// A distribution of lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Each length from the first to the second is equally likely.
    Uniform(u32, u32),
    /// A normal distribution, clamped to the range from 1 to `max`.
    Normal {
        /// The mean, in tokens.
        mean: f64,
        /// The standard deviation, in tokens.
        deviation: f64,
        /// The largest length.
        max: u32,
    },
    /// A log-normal distribution, clamped to the range from 1 to `max`: most lengths are short, and some are long.
    LogNormal {
        /// The median, in tokens.
        median: f64,
        /// The standard deviation of the logarithm.
        sigma: f64,
        /// The largest length.
        max: u32,
    },
}

impl Lengths {
    /// Draws a length.
    pub fn draw(&self, draw: &mut Draw) -> u32 {
        let cut = |length: f64, max: u32| (length.round() as u32).clamp(1, max);
        match *self {
            Self::Uniform(low, high) => low + draw.below(high - low + 1),
            Self::Normal { mean, deviation, max } => cut(mean + deviation * draw.normal(), max),
            Self::LogNormal { median, sigma, max } => cut(median * (sigma * draw.normal()).exp(), max),
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORMS: &str = "must be N, MIN:MAX, normal:MEAN:DEVIATION:MAX or lognormal:MEDIAN:SIGMA:MAX";
        let fields: Vec<&str> = text.split(':').collect();
        let length = |name: &str, text: &str| match text.parse::<u32>() {
            Ok(length) if (1..=MAX).contains(&length) => Ok(length),
            _ => Err(format!("{name} must be from 1 to {MAX} tokens, and is {text}")),
        };
        let positive = |name: &str, text: &str| match text.parse::<f64>() {
            Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(format!("{name} must be a number over 0, and is {text}")),
        };
        match fields[..] {
            ["normal", mean, deviation, max] => Ok(Self::Normal {
                mean: positive("MEAN", mean)?,
                deviation: positive("DEVIATION", deviation)?,
                max: length("MAX", max)?,
            }),
            ["lognormal", median, sigma, max] => Ok(Self::LogNormal {
                median: positive("MEDIAN", median)?,
                sigma: positive("SIGMA", sigma)?,
                max: length("MAX", max)?,
            }),
            [only] if only.bytes().all(|byte| byte.is_ascii_digit()) => {
                let length = length("N", only)?;
                Ok(Self::Uniform(length, length))
            }
            [low, high] if low != "normal" && low != "lognormal" => {
                let (low, high) = (length("MIN", low)?, length("MAX", high)?);
                if low > high {
                    return Err(format!("MIN is {low}, which is over MAX, {high}"));
                }
                Ok(Self::Uniform(low, high))
            }
            _ => Err(FORMS.into()),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform(low, high) if low == high => write!(f, "{low}"),
            Self::Uniform(low, high) => write!(f, "{low}:{high}"),
            Self::Normal { mean, deviation, max } => write!(f, "normal:{mean}:{deviation}:{max}"),
            Self::LogNormal { median, sigma, max } => write!(f, "lognormal:{median}:{sigma}:{max}"),
        }
    }
}

impl Serialize for Lengths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests;
