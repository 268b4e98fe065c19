//! JSON as it streams: where a value ends, and text as the inside of a string.

/// Finds the end of one JSON value, without a stack: brackets are counted, and their kinds are not compared. A value
/// whose brackets do not match ends where their number does; the reader of the arguments sees what the model wrote.
#[derive(Debug, Default)]
pub(crate) struct JsonValue {
    depth: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing of the value has come.
    #[default]
    Before,
    /// Between the strings of an array or object.
    Structure,
    String,
    /// Behind a backslash in a string.
    Escape,
    /// In a number, `true`, `false` or `null` that is the whole value.
    Scalar,
}

/// Whether, and where, a value ends in a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of the text belongs to the value, which goes on.
    Open,
    /// The value ends behind this number of bytes.
    Whole(usize),
    /// The byte at this offset cannot stand in JSON.
    Broken(usize),
}

impl JsonValue {
    /// True inside a string, where any text may stand.
    pub fn in_string(&self) -> bool {
        matches!(self.state, State::String | State::Escape)
    }

    /// Takes the next piece.
    pub fn feed(&mut self, text: &str) -> Extent {
        for (at, byte) in text.bytes().enumerate() {
            match (self.state, byte) {
                (State::Escape, _) => self.state = State::String,
                (State::String, b'\\') => self.state = State::Escape,
                (State::String, b'"') if self.depth == 0 => return Extent::Whole(at + 1),
                (State::String, b'"') => self.state = State::Structure,
                (State::String, _) => {}
                (State::Scalar, _) if is_scalar(byte) => {}
                (State::Scalar, _) => return Extent::Whole(at),
                (State::Before | State::Structure, b'"') => self.state = State::String,
                (State::Before | State::Structure, b'{' | b'[') => {
                    self.depth += 1;
                    self.state = State::Structure;
                }
                (State::Structure, b'}' | b']') => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Extent::Whole(at + 1);
                    }
                }
                (State::Structure, b',' | b':') => {}
                (State::Structure, _) if is_scalar(byte) || byte.is_ascii_whitespace() => {}
                (State::Before, _) if is_scalar(byte) => self.state = State::Scalar,
                (State::Before | State::Structure, _) => return Extent::Broken(at),
            }
        }
        Extent::Open
    }
}

/// True for bytes of numbers and of the words of JSON, Python and JavaScript.
fn is_scalar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.' | b'_')
}

/// Text as the inside of a JSON string.
pub(crate) fn escape(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests;
