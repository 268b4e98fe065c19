//! Layered configuration: defaults, then a file, then `TUTTI_` variables, then flags.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use figment::{
    Figment,
    error::Kind,
    providers::{Env, Format, Serialized, Toml, Yaml},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use tutti_settings::Settings;

use crate::{
    Error,
    command_line::{self, CommandLine, Process, foreign},
    exit,
    nearest::nearest,
    watched_files::WatchedFiles,
};

/// Prefix of environment variables: `TUTTI_MAX_STEP_TOKENS=512` sets `max_step_tokens`. `__` separates the name of a
/// table from a key in it.
pub const ENV_PREFIX: &str = "TUTTI_";

/// Merges the layers into a `C`, whose `Default` is the lowest layer. `flags` serialises only the flags that were
/// given.
///
/// `C` refuses unknown keys, so a misspelt key in a file or variable is an error that names the key and its source.
pub fn layered<C>(file: Option<&Path>, flags: &impl Serialize) -> Result<C, Error>
where
    C: Default + Serialize + DeserializeOwned,
{
    merged(file, Env::prefixed(ENV_PREFIX).split("__"), flags)
}

fn merged<C>(file: Option<&Path>, variables: Env, flags: &impl Serialize) -> Result<C, Error>
where
    C: Default + Serialize + DeserializeOwned,
{
    let mut layers = Figment::from(Serialized::defaults(C::default()));
    if let Some(path) = file {
        layers = merge_file(layers, "config", path)?;
    }
    layers
        .merge(variables)
        .merge(Serialized::defaults(flags))
        .extract()
        .map_err(|errors| explain("config", &errors))
}

/// A process's settings from all layers, with its command line.
#[derive(Clone, Debug)]
pub struct Loaded<S> {
    /// The settings, not validated yet.
    pub settings: S,
    /// True if `--print-config` is given.
    pub print: bool,
    /// The layers that the settings were read from.
    pub layers: Layers,
}

/// The layers of a process's settings. The settings can be read from them again.
#[derive(Clone, Debug)]
pub struct Layers {
    file: Option<PathBuf>,
    flags: Map<String, Value>,
    /// The file's stamp, taken before the file was read.
    pub(crate) watched: WatchedFiles,
}

impl Layers {
    fn new(file: Option<PathBuf>, flags: Map<String, Value>) -> Self {
        let watched = WatchedFiles::new(file.iter().cloned().collect());
        Self { file, flags, watched }
    }

    /// Reads all layers. The settings are not validated.
    pub fn read<C: Default + Serialize + DeserializeOwned>(&self) -> Result<C, Error> {
        layered(self.file.as_deref(), &self.flags)
    }
}

/// Reads all settings of a process. Bad usage ends the process, as does a request for help.
pub fn load<S>(process: Process, arguments: impl IntoIterator<Item = OsString>) -> Result<Loaded<S>, Error>
where
    S: Settings + Serialize + DeserializeOwned,
{
    let CommandLine { config, print_config, settings } =
        exit::unless_parsed(process.name, command_line::parse::<S>(process, arguments), exit::USAGE);
    let layers = Layers::new(config, settings);
    Ok(Loaded { settings: layers.read()?, print: print_config, layers })
}

/// Reads all settings of a command that runs next to a serving process. Environment variables that name no setting of
/// the command are ignored, because they configure the process.
pub fn load_command<S>(process: Process, arguments: impl IntoIterator<Item = OsString>) -> Result<S, Error>
where
    S: Settings + Serialize + DeserializeOwned,
{
    let CommandLine { config, settings, .. } =
        exit::unless_parsed(process.name, command_line::parse::<S>(process, arguments), exit::COMMAND_USAGE);
    merged(config.as_deref(), Env::prefixed(ENV_PREFIX).only(S::keys()), &settings)
}

/// Reads a file that the setting `field` names: TOML or YAML, by the file's extension. An error names the file and the
/// key at fault.
pub fn read<C: DeserializeOwned>(field: &str, file: &Path) -> Result<C, Error> {
    let layers = merge_file(Figment::new(), field, file)?;
    layers.extract().map_err(|errors| explain(field, &errors))
}

fn merge_file(layers: Figment, field: &str, path: &Path) -> Result<Figment, Error> {
    if !path.is_file() {
        return Err(Error::invalid(field, format!("no such file: {}", path.display())));
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("toml") => Ok(layers.merge(Toml::file_exact(path))),
        Some("yaml" | "yml") => Ok(layers.merge(Yaml::file_exact(path))),
        _ => Err(Error::invalid(field, format!("{} must end in .toml, .yaml or .yml", path.display()))),
    }
}

/// Combines all problems into one error. For each problem, the message names the file or the layer that gave the value,
/// and the key.
fn explain(field: &str, errors: &figment::Error) -> Error {
    let first = errors.path.join(".");
    let first_file = file_of(errors);
    let lines: Vec<String> = errors
        .clone()
        .into_iter()
        .map(|error| {
            let (key, file) = (error.path.join("."), file_of(&error));
            // The first file and key are left out: they become the error's field, which is shown before the message.
            let at = if key.is_empty() || key == first { String::new() } else { format!("{key}: ") };
            let file =
                if file == first_file { String::new() } else { file.map_or(String::new(), |f| f + ": ") };
            format!("{file}{at}{}{}", problem(&error), layer_of(&error))
        })
        .collect();
    let error = Error::invalid(field, lines.join("; "));
    match (first_file, first.is_empty()) {
        (Some(file), true) => error.with_field(file),
        (Some(file), false) => error.with_field(format!("{file}: {first}")),
        (None, true) => error,
        (None, false) => error.with_field(first),
    }
}

/// The file that gave the value at fault.
fn file_of(error: &figment::Error) -> Option<String> {
    let path = error.metadata.as_ref()?.source.as_ref()?.file_path()?;
    Some(path.display().to_string())
}

/// The layer that gave the value at fault, unless it is a file.
fn layer_of(error: &figment::Error) -> String {
    match &error.metadata {
        Some(metadata) if file_of(error).is_none() => format!(" in {}", metadata.name),
        _ => String::new(),
    }
}

/// The problem in words. An unknown key gets the nearest that there are, or all if there are few.
fn problem(error: &figment::Error) -> String {
    const FEW: usize = 8;
    let Kind::UnknownField(unknown, known) = &error.kind else { return error.kind.to_string() };
    let near = nearest(unknown, known.iter().copied(), |key| key);
    let quoted = |keys: &[&str]| keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    let hint = match (near.first(), foreign::of_flag(unknown)) {
        (_, Some(hint)) => format!("; {hint}"),
        (Some(near), None) => format!("; did you mean `{near}`?"),
        (None, None) if known.len() <= FEW => format!("; there are {}", quoted(known)),
        (None, None) => "; all are in docs/configuration.md".to_owned(),
    };
    format!("there is no such key{hint}")
}

/// The settings as JSON text, for `--print-config`.
pub fn print(config: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(config)
        .map_err(|e| Error::internal(format!("config does not serialise: {e}")))
}

#[cfg(test)]
mod tests;
