//! Types of PTX.

/// Interpretation of a value's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bits,
    Unsigned,
    Signed,
    Float,
    /// `bf16`: the upper half of an f32.
    Brain,
    /// `tf32`: an f32 with ten bits of mantissa.
    Tensor,
    /// `e4m3`: a float of eight bits. A register holds two.
    E4m3,
    Predicate,
}

/// A type: its kind, its width, and whether a register holds two values (`.f16x2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Type {
    pub kind: Kind,
    /// Bits of the register: 32 for `.f16x2`.
    pub bits: u32,
    pub packed: bool,
}

impl Type {
    /// Parses a type such as `u32`, `.f16x2`, `bf16` or `pred`.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim_start_matches('.');
        if text == "pred" {
            return Some(Type { kind: Kind::Predicate, bits: 1, packed: false });
        }
        if text == "e4m3x2" {
            return Some(Type { kind: Kind::E4m3, bits: 16, packed: true });
        }
        let digits = text.find(|c: char| c.is_ascii_digit())?;
        let (packed, name) = match text.strip_suffix("x2") {
            Some(name) => (true, name),
            None => (false, text),
        };
        let kind = match &name[..digits] {
            "b" => Kind::Bits,
            "u" => Kind::Unsigned,
            "s" => Kind::Signed,
            "f" => Kind::Float,
            "bf" => Kind::Brain,
            "tf" => Kind::Tensor,
            _ => return None,
        };
        let bits: u32 = name[digits..].parse().ok()?;
        let known = match kind {
            Kind::Bits | Kind::Unsigned | Kind::Signed => matches!(bits, 8 | 16 | 32 | 64 | 128),
            Kind::Float => matches!(bits, 16 | 32 | 64),
            Kind::Brain => bits == 16,
            _ => bits == 32,
        };
        (known && (!packed || bits == 16)).then_some(Type { kind, bits: bits << u32::from(packed), packed })
    }

    /// Returns the size in memory, in bytes.
    pub fn bytes(self) -> u32 {
        self.bits.div_ceil(8)
    }
}
