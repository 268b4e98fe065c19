//! White space between the tokens of JSON, as clients ask for it.

use tutti_proto::v1::constraint::Whitespace;
use tutti_runtime::Error;

use crate::http::fields::Fields;

/// Patterns of any amount of white space, as clients of vLLM write them.
const ANY: [&str; 6] = [r"\s*", r"[\s]*", r"[\n\t ]*", r"[ \n\t]*", r"[ \t\n\r]*", r"[\x20\x0A\x0D\x09]*"];

/// The options of a request, each with its name.
#[derive(Debug, Default)]
pub struct WhitespaceOptions {
    asked: Vec<(&'static str, Whitespace)>,
}

impl WhitespaceOptions {
    /// Takes the options of `structured_outputs`.
    pub fn take(fields: &mut Fields<'_>) -> Result<Self, Error> {
        let mut options = Self::default();
        let name = "structured_outputs.whitespace";
        match fields.take::<String>("whitespace")?.as_deref() {
            None => {}
            Some("compact") => options.asked.push((name, Whitespace::Compact)),
            Some("bounded") => options.asked.push((name, Whitespace::Bounded)),
            Some("any") => options.asked.push((name, Whitespace::Any)),
            Some(other) => {
                let message = format!("is {other:?}, but must be one of compact, bounded, any");
                return Err(Error::invalid(name, message));
            }
        }
        if fields.take_or_default("disable_any_whitespace")? {
            options.asked.push(("structured_outputs.disable_any_whitespace", Whitespace::Compact));
        }
        let pattern: Option<String> = fields.take("whitespace_pattern")?;
        options.take_pattern("structured_outputs.whitespace_pattern", pattern)?;
        Ok(options)
    }

    /// Takes vLLM's older option.
    pub fn take_guided(&mut self, fields: &mut Fields<'_>) -> Result<(), Error> {
        let name = "guided_whitespace_pattern";
        let pattern: Option<String> = fields.take(name)?;
        self.take_pattern(name, pattern)
    }

    fn take_pattern(&mut self, name: &'static str, pattern: Option<String>) -> Result<(), Error> {
        match pattern.as_deref() {
            None => {}
            Some("") => self.asked.push((name, Whitespace::Compact)),
            Some(pattern) if ANY.contains(&pattern) => self.asked.push((name, Whitespace::Any)),
            Some(pattern) => {
                let message = format!(
                    "is {pattern:?}, which is not supported: it may be \"\" for none or {:?} for any; by default, \
                     white space is bounded",
                    ANY[0]
                );
                return Err(Error::invalid(name, message));
            }
        }
        Ok(())
    }

    /// The white space that all options agree on.
    pub fn resolve(self) -> Result<Whitespace, Error> {
        let mut asked = self.asked.into_iter();
        let Some((name, whitespace)) = asked.next() else { return Ok(Whitespace::Bounded) };
        match asked.find(|(_, other)| *other != whitespace) {
            Some((other, _)) => Err(Error::invalid(other, format!("contradicts {name}"))),
            None => Ok(whitespace),
        }
    }
}
