//! Structural tags: `structures` and `triggers`.

use serde_json::value::RawValue;
use tutti_proto::v1 as pb;
use tutti_runtime::Error;

use crate::http::fields::Fields;

/// Maximum number of structures and triggers that are parsed. It is above the limit of constraints.
const MAX_LISTED: usize = 1024;

/// Reads structural tags: an object, or its JSON as a text.
pub fn read(name: &str, value: &RawValue) -> Result<pb::StructuralTags, Error> {
    let text = super::object_text(name, value)?;
    let value: &RawValue =
        serde_json::from_str(&text).map_err(|error| Error::invalid(name, format!("is no JSON: {error}")))?;
    let mut fields = Fields::of_value(name, value)?;
    match fields.take::<String>("type")?.as_deref() {
        None | Some("structural_tag") => {}
        Some(other) => {
            let message = format!("is {other:?}, but must be structural_tag");
            return Err(Error::invalid(fields.name("type"), message));
        }
    }
    let tags = take(&mut fields)?;
    fields.finish()?;
    Ok(tags)
}

/// Takes the members of structural tags.
pub fn take(fields: &mut Fields<'_>) -> Result<pb::StructuralTags, Error> {
    if fields.take_raw("format").is_some() {
        let message = "is not supported: structural tags are given by structures and triggers";
        return Err(Error::invalid(fields.name("format"), message));
    }
    let name = fields.name("structures");
    let structures: Option<Vec<&RawValue>> = fields.take_list("structures", MAX_LISTED)?;
    let structures = structures.ok_or_else(|| Error::invalid(&name, "is required"))?;
    let structures = structures.into_iter().enumerate();
    let tags =
        structures.map(|(n, value)| structure(&format!("{name}[{n}]"), value)).collect::<Result<_, _>>()?;
    let triggers: Option<Vec<String>> = fields.take_list("triggers", MAX_LISTED)?;
    let triggers = triggers.ok_or_else(|| Error::invalid(fields.name("triggers"), "is required"))?;
    Ok(pb::StructuralTags { tags, triggers })
}

fn structure(path: &str, value: &RawValue) -> Result<pb::StructuralTag, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let (begin, end) = (fields.require("begin")?, fields.require("end")?);
    let name = fields.name("schema");
    let schema = fields.take_raw("schema").ok_or_else(|| Error::invalid(&name, "is required"))?;
    let schema = super::object_text(&name, schema)?;
    fields.finish()?;
    Ok(pb::StructuralTag { begin, schema, end })
}
