//! The command line of a process, made from the declarations of its settings.

pub(crate) mod foreign;
pub mod processes;

use std::{ffi::OsString, path::PathBuf};

use clap::{
    Arg, ArgAction, ArgMatches, Command,
    builder::PossibleValuesParser,
    error::{ContextKind, ContextValue, ErrorKind},
    parser::ValueSource,
    value_parser,
};
use serde_json::{Map, Value};
use tutti_settings::{Kind, Setting, Settings};

use crate::{Error, VERSION};

/// An executable, as `--help` describes it.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// The executable's name.
    pub name: &'static str,
    /// One sentence about what it does.
    pub about: &'static str,
    /// A setting and a value for it, with which `--help` shows the syntax of the file and of environment variables.
    pub example: (&'static str, &'static str),
    /// True if the executable has the flag `--print-config`.
    pub prints_config: bool,
    /// A setting that is given by its value alone, without a flag.
    pub positional: Option<&'static str>,
    /// True if the executable takes a model, so that flags of other servers may be meant for it.
    pub serves_models: bool,
}

/// The content of a parsed command line.
#[derive(Clone, Debug)]
pub struct CommandLine {
    /// The file with settings that `--config` names.
    pub config: Option<PathBuf>,
    /// True if `--print-config` is given.
    pub print_config: bool,
    /// The settings given as flags, in the shape of the file.
    pub settings: Map<String, Value>,
}

const CONFIG: &str = "config";
const PRINT_CONFIG: &str = "print_config";

/// Parses a command line. The error is clap's, with usage and hints.
pub fn parse<S: Settings>(
    process: Process,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<CommandLine, clap::Error> {
    let mut command = command::<S>(process);
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let matches = command
        .try_get_matches_from_mut(&arguments)
        .map_err(|error| if process.serves_models { hinted(error, &arguments) } else { error })?;
    let settings =
        given(&S::declared(), &matches).map_err(|error| command.error(ErrorKind::InvalidUtf8, error))?;
    Ok(CommandLine {
        config: matches.get_one(CONFIG).cloned(),
        print_config: process.prints_config && matches.get_flag(PRINT_CONFIG),
        settings,
    })
}

/// Adds a hint to the error of an argument that other servers have. The hint replaces the flag that clap finds similar.
fn hinted(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else { return error };
    let hint = if unknown.starts_with('-') {
        foreign::of_flag(unknown).map(str::to_owned)
    } else {
        let mut after = arguments.iter().skip_while(|argument| *argument != unknown.as_str()).skip(1);
        Some(foreign::of_value(unknown, after.next().and_then(|next| next.to_str())))
    };
    if let Some(hint) = hint {
        error.remove(ContextKind::SuggestedArg);
        // The usage is that of the similar flag.
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error
}

/// The flags of a process: one for each setting that is declared as a flag, under the setting's heading.
pub fn command<S: Settings>(process: Process) -> Command {
    let (key, value) = process.example;
    let variable = format!("{}{}", crate::config::ENV_PREFIX, key.to_uppercase());
    let config = Arg::new(CONFIG)
        .long("config")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help("TOML or YAML file with settings; environment variables and flags override it");
    let print_config = Arg::new(PRINT_CONFIG)
        .long("print-config")
        .action(ArgAction::SetTrue)
        .help("Print the settings in force as JSON and exit");
    Command::new(process.name)
        .version(VERSION)
        .about(process.about)
        // A width of 0 turns wrapping off, so each flag takes one line.
        .term_width(0)
        .after_help(format!(
            "Each setting can also stand in the file, as in {key} = {value}, or in a variable, as in {variable}={value}.\n\
             All settings, also those without a flag: docs/configuration.md"
        ))
        .arg(config)
        .args(process.prints_config.then_some(print_config))
        .args(S::declared().iter().filter(|setting| setting.is_flag).map(|setting| {
            if process.positional == Some(setting.name) {
                typed(setting)
            } else {
                typed(setting).long(setting.name.replace('_', "-"))
            }
        }))
}

/// The argument of a setting, by the setting's kind. The caller adds the long name of a flag.
fn typed(setting: &Setting) -> Arg {
    let arg = Arg::new(setting.name).help_heading(setting.heading).help(setting.line());
    let arg = match setting.kind {
        Kind::Switch => return arg.action(ArgAction::SetTrue),
        Kind::Number => arg.value_parser(value_parser!(u32)),
        Kind::Text => arg.value_parser(value_parser!(String)),
        Kind::Path => arg.value_parser(value_parser!(PathBuf)),
        Kind::List => arg.value_parser(value_parser!(String)).action(ArgAction::Append),
        Kind::Choice(choices) => {
            arg.value_parser(PossibleValuesParser::new(choices.iter().map(|choice| choice.name)))
        }
        Kind::Parsed(check) => arg.value_parser(move |text: &str| check(text).map(|()| text.to_owned())),
    };
    arg.hide_possible_values(true)
        .value_name(setting.unit.map_or_else(|| setting.name.to_uppercase(), str::to_owned))
}

/// The settings that were given on the command line. The kind of a setting decides the type of the value. A setting
/// that belongs to a table is put into that table.
fn given(declared: &[Setting], matches: &ArgMatches) -> Result<Map<String, Value>, serde_json::Error> {
    let mut settings = Map::new();
    for setting in declared.iter().filter(|setting| setting.is_flag) {
        let name = setting.name;
        if matches.value_source(name) != Some(ValueSource::CommandLine) {
            continue;
        }
        let value = match setting.kind {
            Kind::Switch => Value::Bool(matches.get_flag(name)),
            Kind::Number => serde_json::to_value(matches.get_one::<u32>(name))?,
            Kind::Path => serde_json::to_value(matches.get_one::<PathBuf>(name))?,
            Kind::List => Value::Array(
                matches.get_many::<String>(name).unwrap_or_default().cloned().map(Value::from).collect(),
            ),
            Kind::Text | Kind::Choice(_) | Kind::Parsed(_) => {
                serde_json::to_value(matches.get_one::<String>(name))?
            }
        };
        match setting.table {
            None => {
                settings.insert(name.to_owned(), value);
            }
            Some(table) => {
                let table = settings.entry(table).or_insert_with(|| Value::Object(Map::new()));
                if let Value::Object(table) = table {
                    table.insert(name.to_owned(), value);
                }
            }
        }
    }
    Ok(settings)
}

/// Settings from the command line alone. Settings that it lacks have their defaults. File and environment are not read.
pub fn settings<S: serde::de::DeserializeOwned>(command_line: CommandLine) -> Result<S, Error> {
    serde_json::from_value(Value::Object(command_line.settings))
        .map_err(|error| Error::internal(format!("the command line does not fit the settings: {error}")))
}

#[cfg(test)]
mod tests;
