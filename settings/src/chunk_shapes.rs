//! The fixed sizes of steps in tokens, such as `64,256,1024`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    Kind,
    value::{self, Value},
};

/// Maximum tokens of a shape. The budget of a step has the same maximum.
const MOST_TOKENS: usize = 1 << 20;

/// The numbers of tokens to which steps are padded, in ascending order. There is at least one, and none is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkShapes(Vec<usize>);

impl ChunkShapes {
    /// Checks shapes. The error names the wrong shape.
    pub fn new(shapes: Vec<usize>) -> Result<Self, String> {
        if shapes.is_empty() {
            return Err("has no shape, but needs at least one".to_owned());
        }
        if shapes.contains(&0) {
            return Err("has a shape of 0 tokens, but each needs at least 1".to_owned());
        }
        if let Some(pair) = shapes.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!("has {} after {}, but shapes must ascend", pair[1], pair[0]));
        }
        match shapes.last() {
            Some(most) if *most > MOST_TOKENS => {
                Err(format!("has a shape of {most} tokens, the limit is {MOST_TOKENS}"))
            }
            _ => Ok(Self(shapes)),
        }
    }

    /// The smallest shape of at least `tokens` tokens; `None` if all shapes are smaller.
    pub fn fit(&self, tokens: usize) -> Option<usize> {
        self.0.get(self.0.partition_point(|shape| *shape < tokens)).copied()
    }

    /// The greatest shape, in tokens.
    pub fn greatest(&self) -> usize {
        self.0.last().copied().unwrap_or(0)
    }

    /// All shapes, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }
}

impl FromStr for ChunkShapes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
        let number =
            |part: &str| part.parse().map_err(|_| format!("has {part:?}, which is no number of tokens"));
        Self::new(parts.map(number).collect::<Result<_, _>>()?)
    }
}

impl fmt::Display for ChunkShapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes: Vec<String> = self.iter().map(|shape| shape.to_string()).collect();
        f.write_str(&shapes.join(","))
    }
}

impl Serialize for ChunkShapes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}

impl<'de> Deserialize<'de> for ChunkShapes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a whole number, a text or a list of whole numbers")]
        enum Written {
            Number(usize),
            Text(String),
            List(Vec<usize>),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(shape) => Self::new(vec![shape]),
            Written::Text(text) => text.parse(),
            Written::List(shapes) => Self::new(shapes),
        }
        .map_err(de::Error::custom)
    }
}

impl Value for ChunkShapes {
    const KIND: Kind = Kind::Parsed(value::parse::<Self>);

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

#[cfg(test)]
mod tests;
