//! The settings in the Helm chart's `values.schema.json`, made from the declarations.
//!
//! `router.settings` and `conductor.settings` of the chart's values become the processes' files of settings. The schema
//! makes Helm refuse unknown names and wrong types before anything is installed. Settings that the chart sets by
//! itself, such as addresses, are left out, so that no setting has two sources.

use std::fmt::Write;

use crate::{ConductorSettings, Kind, RouterProcessSettings, Setting, Settings};

/// The line of the schema after which all lines are generated from the declarations.
pub const MARK: &str = "  \"$comment\": \"What follows is made from settings/src: UPDATE_CHART=1 cargo test -p tutti-settings writes it again.\",\n";

/// Settings whose value, or whose file, the chart determines.
const SET_BY_CHART: [&str; 25] = [
    "api_key_file",
    "cluster_grpc",
    "cluster_tls_ca",
    "cluster_tls_cert",
    "cluster_tls_key",
    "cluster_token_file",
    "conductor",
    "device",
    "discover",
    "drain_timeout",
    "grpc",
    "http",
    "insecure_plaintext",
    "join_token_file",
    "lame_duck",
    "model",
    "no_router",
    "operations",
    "served_model_name",
    "tls_cert",
    "tls_key",
    "topology",
    "tp",
    "worker_listen",
    "workers",
];

/// Returns the end of the schema, after [`MARK`].
pub fn definitions() -> String {
    let mut text = String::from("  \"definitions\": {\n");
    let processes =
        [("conductor", ConductorSettings::declared()), ("router", RouterProcessSettings::declared())];
    for (index, (name, settings)) in processes.iter().enumerate() {
        let (tables, top): (Vec<_>, Vec<_>) = settings
            .iter()
            .filter(|setting| !SET_BY_CHART.contains(&setting.name))
            .partition(|setting| setting.table.is_some());
        let mut properties: Vec<String> = top.into_iter().map(|s| property(s, 8)).collect();
        let mut names: Vec<&str> = Vec::new();
        for table in tables.iter().filter_map(|setting| setting.table) {
            if !names.contains(&table) {
                names.push(table);
            }
        }
        for table in names {
            let of_table = tables.iter().filter(|setting| setting.table == Some(table));
            let inner: Vec<String> = of_table.map(|s| property(s, 12)).collect();
            properties.push(format!("        \"{table}\": {}", object(&inner, 8)));
        }
        // Writing to a String cannot fail.
        let _ = write!(text, "    \"{name}\": {}", object(&properties, 4));
        text += if index + 1 < processes.len() { ",\n" } else { "\n" };
    }
    text + "  }\n}\n"
}

fn object(properties: &[String], indent: usize) -> String {
    let space = " ".repeat(indent);
    format!(
        "{{\n{space}  \"type\": \"object\",\n{space}  \"additionalProperties\": false,\n{space}  \"properties\": {{\n{}\n{space}  }}\n{space}}}",
        properties.join(",\n")
    )
}

/// One line of the schema: a setting's name and its permitted values.
fn property(setting: &Setting, indent: usize) -> String {
    let (space, name) = (" ".repeat(indent), setting.name);
    let help = setting.help.replace('\\', "\\\\").replace('"', "\\\"");
    format!("{space}\"{name}\": {{ {}, \"description\": \"{help}\" }}", form(setting))
}

fn form(setting: &Setting) -> String {
    match setting.kind {
        Kind::Switch => "\"type\": \"boolean\"".to_owned(),
        Kind::Number => {
            let (min, max) = setting.range;
            let most = if max == u64::MAX { String::new() } else { format!(", \"maximum\": {max}") };
            format!("\"type\": \"integer\", \"minimum\": {min}{most}")
        }
        Kind::Text | Kind::Path => "\"type\": \"string\", \"minLength\": 1".to_owned(),
        Kind::List => "\"type\": \"array\", \"items\": { \"type\": \"string\" }".to_owned(),
        Kind::Choice(choices) => {
            let names: Vec<String> = choices.iter().map(|choice| format!("\"{}\"", choice.name)).collect();
            format!("\"enum\": [{}]", names.join(", "))
        }
        Kind::Parsed(_) => parsed(setting.unit).to_owned(),
    }
}

/// The pattern of a text in the schema, by the setting's unit. The pattern is coarse: the process checks the text when
/// it starts.
fn parsed(unit: Option<&str>) -> &'static str {
    match unit {
        Some("SIZE") => {
            "\"type\": [\"string\", \"integer\"], \"minimum\": 1, \"pattern\": \"^[0-9]+ ?([KkMmGgTt][Ii]?)?[Bb]?$\""
        }
        Some("SIZE_OR_0") => {
            "\"type\": [\"string\", \"integer\"], \"minimum\": 0, \"pattern\": \"^[0-9]+ ?([KkMmGgTt][Ii]?)?[Bb]?$\""
        }
        Some("TOKENS,...") => "\"type\": \"string\", \"pattern\": \"^[0-9]+(,[0-9]+)*$\"",
        _ => "\"type\": \"string\", \"minLength\": 1",
    }
}

#[cfg(test)]
mod tests;
