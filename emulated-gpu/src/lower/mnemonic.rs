//! Instruction names with their modifiers.

use crate::ptx::Type;

/// An instruction's name and modifiers. The lowering takes each modifier that it supports. Any other modifier is an
/// error.
pub(crate) struct Mnemonic<'a> {
    pub text: &'a str,
    pub name: &'a str,
    modifiers: Vec<&'a str>,
}

impl<'a> Mnemonic<'a> {
    pub fn new(text: &'a str) -> Self {
        let mut parts = text.split('.');
        Mnemonic { text, name: parts.next().unwrap_or(""), modifiers: parts.collect() }
    }

    /// Removes a modifier. Returns true if the instruction had this modifier.
    pub fn take(&mut self, modifier: &str) -> bool {
        match self.modifiers.iter().position(|&m| m == modifier) {
            Some(index) => {
                self.modifiers.remove(index);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier in `choices` that the instruction has. Returns the modifier's index in `choices`.
    pub fn take_any(&mut self, choices: &[&str]) -> Option<usize> {
        choices.iter().position(|choice| self.take(choice))
    }

    /// Removes and returns the first modifier that is left.
    pub fn take_first(&mut self) -> Option<&'a str> {
        (!self.modifiers.is_empty()).then(|| self.modifiers.remove(0))
    }

    /// Removes and returns the last modifier, if it is a type.
    pub fn take_type(&mut self) -> Option<Type> {
        let ty = Type::parse(self.modifiers.last()?)?;
        self.modifiers.pop();
        Some(ty)
    }

    /// Takes the modifiers that have no effect in the emulator: cache and eviction hints.
    pub fn take_hints(&mut self) {
        const HINTS: [&str; 10] = ["nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "cop", "unified"];
        self.modifiers.retain(|m| !HINTS.contains(m) && !m.starts_with("L1::") && !m.starts_with("L2::"));
    }

    /// Returns the name with all modifiers that are left, to look up an operation. If the operation exists, the caller
    /// takes these modifiers with [`Mnemonic::take_rest`].
    pub fn rest(&self) -> String {
        let mut joined = self.name.to_owned();
        for modifier in &self.modifiers {
            joined.push('.');
            joined.push_str(modifier);
        }
        joined
    }

    /// Takes all modifiers that are left.
    pub fn take_rest(&mut self) {
        self.modifiers.clear();
    }

    /// Returns the error that the instruction is not supported.
    pub fn unknown<T>(&self) -> Result<T, String> {
        Err(format!("the instruction `{}` is not supported", self.text))
    }

    /// Fails if a modifier is left.
    pub fn finish(&self) -> Result<(), String> {
        match self.modifiers.first() {
            None => Ok(()),
            Some(left) => Err(format!("the modifier `.{left}` of `{}` is not supported", self.text)),
        }
    }
}
