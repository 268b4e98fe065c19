//! The names that a format carries: what its grammar admits, its reader reads.

use crate::{Format, limits::MAX_NAME};

/// Characters of a tool's name besides letters and digits. Every format carries them.
pub const NAME_CHARS: &str = "_-.:/";

/// True if a tool's name may have this character.
pub fn is_name_char(character: char) -> bool {
    character.is_alphanumeric() || NAME_CHARS.contains(character)
}

/// The names of parameters that a format carries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ParameterNames {
    /// Any: they are strings of JSON.
    Any,
    /// Words of the characters of tools' names.
    Words,
    /// Text up to this marker, without white space around it.
    Before(&'static str),
}

/// Why a format does not carry a parameter's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameRefusal {
    /// The name has this many bytes.
    #[error("is the name of {0} bytes, but may have at most {MAX_NAME}")]
    Long(usize),
    /// The name is no word.
    #[error("is the name {0:?}, but must be letters, digits and {NAME_CHARS}")]
    NoWord(String),
    /// White space around the name would be lost.
    #[error("is the name {0:?}, which has white space around it")]
    Spaced(String),
    /// The name has the text in it that ends names.
    #[error("is the name {0:?}, which has {1:?} in it")]
    HasMarker(String, &'static str),
}

impl Format {
    /// Refuses the name of a parameter that calls of the format do not carry.
    pub fn check_parameter_name(self, name: &str) -> Result<(), NameRefusal> {
        let names = self.parameter_names();
        match names {
            ParameterNames::Any => Ok(()),
            _ if name.len() > MAX_NAME => Err(NameRefusal::Long(name.len())),
            ParameterNames::Words if name.is_empty() || !name.chars().all(is_name_char) => {
                Err(NameRefusal::NoWord(name.to_owned()))
            }
            ParameterNames::Words => Ok(()),
            ParameterNames::Before(_) if name.trim() != name => Err(NameRefusal::Spaced(name.to_owned())),
            ParameterNames::Before(end) if name.contains(end) => {
                Err(NameRefusal::HasMarker(name.to_owned(), end))
            }
            ParameterNames::Before(_) => Ok(()),
        }
    }
}
