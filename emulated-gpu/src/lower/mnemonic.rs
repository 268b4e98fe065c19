//! Names of instructions with their modifiers.

use crate::ptx::Type;

/// An instruction's name. The lowering takes each modifier that it supports. A modifier that is left over is an error.
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

    /// Takes a modifier. Returns true if the instruction had it.
    pub fn take(&mut self, modifier: &str) -> bool {
        match self.modifiers.iter().position(|&m| m == modifier) {
            Some(index) => {
                self.modifiers.remove(index);
                true
            }
            None => false,
        }
    }

    /// Takes the first of `choices` that the instruction has, and returns its index in `choices`.
    pub fn take_any(&mut self, choices: &[&str]) -> Option<usize> {
        choices.iter().position(|choice| self.take(choice))
    }

    /// Takes the first modifier that is left.
    pub fn take_first(&mut self) -> Option<&'a str> {
        (!self.modifiers.is_empty()).then(|| self.modifiers.remove(0))
    }

    /// Takes the last modifier, if it is a type.
    pub fn take_type(&mut self) -> Option<Type> {
        let ty = Type::parse(self.modifiers.last()?)?;
        self.modifiers.pop();
        Some(ty)
    }

    /// Takes the modifiers that have no effect here: cache and eviction hints.
    pub fn take_hints(&mut self) {
        const HINTS: [&str; 10] = ["nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "cop", "unified"];
        self.modifiers.retain(|m| !HINTS.contains(m) && !m.starts_with("L1::") && !m.starts_with("L2::"));
    }

    /// Returns the name with all modifiers that are left, to look up an operation. If there is one,
    /// [`Mnemonic::take_rest`] takes them.
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

    /// Returns the error of an unsupported instruction.
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
