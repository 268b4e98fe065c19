//! Reading of a header's fields, little-endian.

use std::io::Read;

use super::Value;

/// Maximum bytes of a text.
const MAX_TEXT_BYTES: u64 = 16 << 20;
/// Maximum bytes of a header. Vocabularies and merges take the most.
const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Maximum number of entries of all lists together. An entry takes up to 24 bytes, also one that has a single byte in
/// the file.
const MAX_ENTRIES: u64 = 16 << 20;

// Types of values.
const STRING: u32 = 8;
const ARRAY: u32 = 9;

pub(super) struct Reader<R> {
    input: R,
    position: u64,
    /// Bytes of the file, or the limit of a header if that is less.
    end: u64,
    /// Number of entries of lists that may still follow.
    entries_left: u64,
}

impl<R: Read> Reader<R> {
    pub fn new(input: R, file_bytes: u64) -> Self {
        let end = file_bytes.min(MAX_HEADER_BYTES);
        Self { input, position: 0, end, entries_left: MAX_ENTRIES }
    }

    /// Bytes read so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Refuses to read more bytes than follow.
    fn claim(&mut self, bytes: u64) -> Result<(), String> {
        let rest = self.end - self.position;
        if bytes > rest {
            return Err(format!("needs {bytes} bytes, but {rest} bytes follow: the file is truncated"));
        }
        self.position += bytes;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.claim(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
        Ok(bytes)
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        if length > MAX_TEXT_BYTES {
            return Err(format!("a text of {length} bytes, the limit is {MAX_TEXT_BYTES}"));
        }
        self.claim(length)?;
        let mut bytes = vec![0; length as usize];
        self.input.read_exact(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
        String::from_utf8(bytes).map_err(|_| "a text is not UTF-8".into())
    }

    /// Reads a value of the type with this number.
    pub fn value(&mut self, kind: u32) -> Result<Value, String> {
        match kind {
            STRING => self.text().map(Value::Text),
            ARRAY => self.list(),
            kind => self.scalar(kind),
        }
    }

    fn scalar(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(u32::from_le_bytes(self.array()?).into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Flag(u8::from_le_bytes(self.array()?) != 0),
            10 => Value::Integer(u64::from_le_bytes(self.array()?).into()),
            11 => Value::Integer(i64::from_le_bytes(self.array()?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("is of type {other}, which GGUF does not have")),
        })
    }

    /// Reads a list. It grows as it is read, so a list that claims more entries than follow takes no memory.
    fn list(&mut self) -> Result<Value, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        if kind == ARRAY {
            return Err("is a list of lists, which is not supported".into());
        }
        let Some(left) = self.entries_left.checked_sub(count) else {
            return Err(format!("is a list of {count} entries; lists may have {MAX_ENTRIES} in all"));
        };
        self.entries_left = left;
        match kind {
            STRING => {
                let mut texts = Vec::new();
                for _ in 0..count {
                    texts.push(self.text()?);
                }
                return Ok(Value::Texts(texts));
            }
            6 | 12 => {
                let mut floats = Vec::new();
                for _ in 0..count {
                    if let Value::Float(number) = self.scalar(kind)? {
                        floats.push(number as f32);
                    }
                }
                return Ok(Value::Floats(floats));
            }
            _ => {}
        }
        let mut integers = Vec::new();
        for _ in 0..count {
            match self.scalar(kind)? {
                Value::Integer(number) => {
                    integers.push(i64::try_from(number).map_err(|_| format!("{number} is too large"))?);
                }
                Value::Flag(flag) => integers.push(flag.into()),
                _ => {}
            }
        }
        Ok(Value::Integers(integers))
    }
}
