//! Bounds on the number of values in JSON, before it is parsed. A parsed value takes many times the bytes of its JSON:
//! `{"a":0}` has 7 bytes as JSON and several hundred as a map.

use tutti_runtime::Error;

/// The number of values of several pieces of JSON, up to a limit.
#[derive(Debug)]
pub struct ValueCount {
    count: usize,
    limit: usize,
}

impl ValueCount {
    /// A count that may reach `limit`.
    pub const fn up_to(limit: usize) -> Self {
        Self { count: 0, limit }
    }

    /// Adds the values in valid JSON. The error's field is `name`.
    pub fn add(&mut self, name: &str, json: &str) -> Result<(), Error> {
        self.count += count(json);
        if self.count > self.limit {
            let message = format!("has more than {} values, all members and elements counted", self.limit);
            return Err(Error::invalid(name, message));
        }
        Ok(())
    }
}

/// Number of values in valid JSON, those inside of others included. An empty list or object counts twice.
fn count(json: &str) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests;
