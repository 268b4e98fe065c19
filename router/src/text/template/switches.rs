//! A request's wishes about reasoning, as variables of the chat template.
//!
//! Families name the variable by which reasoning is turned on and off in their own ways. The template is asked which of
//! the names it reads, so that a wish that it would ignore is refused.

use serde_json::Value;
use tutti_runtime::Error;

use super::{ChatTemplate, RenderOptions};

/// Names of the variable, and of the parameters, that turn reasoning on and off: those of Qwen and GLM, and of
/// DeepSeek, Kimi and Granite.
pub const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// Name of the variable, and of the parameter, that says how much a model reasons.
pub const EFFORT: &str = "reasoning_effort";
/// The effort that turns reasoning off.
const NO_EFFORT: &str = "none";

/// A switch that a request sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// The parameter that sets it.
    pub parameter: &'static str,
    /// True if the model is to reason.
    pub is_on: bool,
}

/// The wishes of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Reasoning on or off.
    pub thinking: Option<Switch>,
    /// How much the model reasons, such as `low`.
    pub effort: Option<String>,
}

impl ChatTemplate {
    /// Turns the wishes of a request into variables.
    pub fn set_switches(&self, options: &mut RenderOptions) -> Result<(), Error> {
        let Switches { thinking, effort } = std::mem::take(&mut options.switches);
        if let Some(Switch { parameter, is_on }) = thinking {
            let Some(variable) = self.switch() else {
                let message =
                    "is not supported: the chat template has no variable that turns reasoning on and off";
                return Err(Error::invalid(parameter, message));
            };
            set(options, parameter, variable, is_on.into())?;
        }
        let Some(effort) = effort else { return Ok(()) };
        if self.variables.contains(EFFORT) {
            return set(options, EFFORT, EFFORT, effort.into());
        }
        match self.switch() {
            Some(variable) if effort == NO_EFFORT => set(options, EFFORT, variable, false.into()),
            Some(_) => {
                let message = format!(
                    "is {effort:?}, but the chat template has no variable of that name: {NO_EFFORT:?} turns reasoning \
                     off, and other efforts are not known"
                );
                Err(Error::invalid(EFFORT, message))
            }
            None => Err(Error::invalid(
                EFFORT,
                "is not supported: the chat template has no variable of that name",
            )),
        }
    }

    /// The variable of the template that turns reasoning on and off.
    fn switch(&self) -> Option<&'static str> {
        SWITCHES.into_iter().find(|name| self.variables.contains(*name))
    }
}

/// Sets a variable. Refuses another value that `chat_template_kwargs` gives.
fn set(options: &mut RenderOptions, parameter: &str, variable: &str, value: Value) -> Result<(), Error> {
    match options.variables.get(variable) {
        Some(given) if *given != value => {
            let message = format!("is not what chat_template_kwargs.{variable} says");
            Err(Error::invalid(parameter, message))
        }
        _ => {
            options.variables.insert(variable.to_owned(), value);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
