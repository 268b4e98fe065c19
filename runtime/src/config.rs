//! Layered configuration: defaults, then a file, then `TUTTI_` variables, then flags.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use figment::{
    Figment,
    providers::{Env, Format, Serialized, Toml, Yaml},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use tutti_settings::Settings;

use crate::{
    Error,
    command_line::{self, CommandLine, Process},
    exit,
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

/// Combines all problems into one error. For each problem, the message names the key, and the layer that gave the
/// value.
fn explain(field: &str, errors: &figment::Error) -> Error {
    let first_key = errors.path.join(".");
    let lines: Vec<String> = errors
        .clone()
        .into_iter()
        .map(|error| {
            let key = error.path.join(".");
            let source = error.metadata.as_ref().map(|m| match &m.source {
                Some(source) => format!(" in {} {source}", m.name),
                None => format!(" in {}", m.name),
            });
            // The first key is left out: it becomes the error's field, which is shown before the message.
            let at = if key.is_empty() || key == first_key { String::new() } else { format!("{key}: ") };
            format!("{at}{}{}", error.kind, source.unwrap_or_default())
        })
        .collect();
    let error = Error::invalid(field, lines.join("; "));
    if first_key.is_empty() { error } else { error.with_field(first_key) }
}

/// The settings as JSON text, for `--print-config`.
pub fn print(config: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(config)
        .map_err(|e| Error::internal(format!("config does not serialise: {e}")))
}

#[cfg(test)]
mod tests;
