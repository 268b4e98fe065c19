//! The parameters of reasoning.

use serde_json::value::RawValue;
use tutti_runtime::Error;

use super::fields::{self, Fields};
use crate::text::template::{EFFORT, SWITCHES, Switch, Switches};

/// Values of `reasoning_effort`. The chat template says which of them it knows.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Takes the parameters that the chat template gets.
pub fn switches(fields: &mut Fields<'_>) -> Result<Switches, Error> {
    let mut thinking: Option<Switch> = None;
    for parameter in SWITCHES {
        let Some(value) = fields.take_raw(parameter) else { continue };
        let is_on = is_on(parameter, value)?;
        match &thinking {
            Some(earlier) if earlier.is_on != is_on => {
                let message = format!("is not what {}, its other name, says", earlier.parameter);
                return Err(Error::invalid(parameter, message));
            }
            _ => thinking = Some(Switch { parameter, is_on }),
        }
    }
    let effort: Option<String> = fields.take(EFFORT)?;
    if let Some(effort) = effort.as_deref().filter(|effort| !EFFORTS.contains(effort)) {
        let message = format!("is {effort:?}; there are {}", EFFORTS.join(", "));
        return Err(Error::invalid(EFFORT, message));
    }
    Ok(Switches { thinking, effort })
}

/// Reads a boolean, or `{"type": "enabled"}` as DeepSeek's own server has it.
fn is_on(parameter: &str, value: &RawValue) -> Result<bool, Error> {
    if !value.get().starts_with('{') {
        return fields::parse(parameter, value);
    }
    let mut fields = Fields::of_value(parameter, value)?;
    let kind: String = fields.require("type")?;
    let path = fields.name("type");
    fields.finish()?;
    match kind.as_str() {
        "enabled" => Ok(true),
        "disabled" => Ok(false),
        _ => Err(Error::invalid(path, format!("is {kind:?}; there are \"enabled\" and \"disabled\""))),
    }
}
