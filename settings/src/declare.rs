//! The three macros that declare settings, and the types that describe the declarations at run time.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserializer,
    de::{DeserializeSeed, Error, MapAccess, Visitor},
};

use crate::{Changes, Invalid};

/// The declaration of one setting.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The key in the file. The flag is the key with hyphens for underscores. The environment variable is the key in
    /// capitals, after `TUTTI_`.
    pub name: &'static str,
    /// The table in which the key stands. None for a key at the top of the file.
    pub table: Option<&'static str>,
    /// The section of `--help` that lists the setting.
    pub heading: &'static str,
    /// One line of help.
    pub help: String,
    /// The kind of value.
    pub kind: Kind,
    /// The value's unit or meaning in capitals, such as `TOKENS` or `FILE`.
    pub unit: Option<&'static str>,
    /// The default, as a value or in words. None if the setting has no default. Also None for switches, which are off
    /// by default.
    pub default: Option<String>,
    /// The minimum and the maximum of a number.
    pub range: (u64, u64),
    /// True if the setting has a flag. A key of a table has a flag only if it is declared with `also a flag`.
    pub is_flag: bool,
    /// True if a new value takes effect in a running process: the setting is declared with `changes live`.
    pub is_live: bool,
}

impl Setting {
    /// The flag, if there is one.
    pub fn flag(&self) -> Option<String> {
        self.is_flag.then(|| format!("--{}", self.name.replace('_', "-")))
    }

    /// The line of `--help`: meaning, choices and default.
    pub fn line(&self) -> String {
        let mut line = self.help.clone();
        if let Kind::Choice(choices) = self.kind {
            let names: Vec<&str> = choices.iter().map(|choice| choice.name).collect();
            line += &format!(": {}", names.join(", "));
        }
        if let Some(default) = &self.default {
            line += &format!(" [default: {default}]");
        }
        line
    }
}

/// The kind of a setting's value.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A boolean, true if its flag is given. The flag takes no value.
    Switch,
    /// A whole number.
    Number,
    /// Any text.
    Text,
    /// A path.
    Path,
    /// Several texts: the flag may be repeated.
    List,
    /// One of these names.
    Choice(&'static [Choice]),
    /// Text of a form that the function checks.
    Parsed(fn(&str) -> Result<(), String>),
}

/// A name that a setting may have as its value.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The name, as it is written on the command line, in files and on the wire.
    pub name: &'static str,
    /// The meaning of the name.
    pub help: &'static str,
}

/// A struct of settings: a group, or a process with all its groups.
pub trait Settings: Default {
    /// Declarations of all settings, in the order of the struct.
    fn declared() -> Vec<Setting>;

    /// All keys, and the names of tables.
    fn keys() -> &'static [&'static str];

    /// Sets the setting `key` to the next value of `map`. False if there is no such key.
    fn set<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error>;

    /// Returns an error if a number is outside its setting's range.
    fn check_ranges(&self) -> Result<(), Invalid>;

    /// Takes the values of `new` for settings that change live, and notes them in `changes`. Other settings keep their
    /// values, and `changes` names those that differ.
    fn change_to(&mut self, new: &Self, changes: &mut Changes);
}

/// Reads settings. An absent setting keeps its default, and an unknown key is an error.
pub fn deserialize<'de, S: Settings, D: Deserializer<'de>>(deserializer: D) -> Result<S, D::Error> {
    struct Over<S>(PhantomData<S>);

    impl<'de, S: Settings> Visitor<'de> for Over<S> {
        type Value = S;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a table of settings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<S, A::Error> {
            let mut settings = S::default();
            while let Some(key) = map.next_key::<String>()? {
                if !settings.set(&key, &mut map)? {
                    map.next_value_seed(UnknownKey::<S>(&key, PhantomData))?;
                }
            }
            Ok(settings)
        }
    }

    deserializer.deserialize_map(Over(PhantomData))
}

/// The sections of `--help`, in order.
const HEADINGS: [&str; 7] =
    ["Model", "Cluster", "Encryption", "Scheduling", "Device and memory", "Faults", "Output"];

/// Sorts settings by heading. Settings under one heading keep their order.
pub fn in_order(mut declared: Vec<Setting>) -> Vec<Setting> {
    declared.sort_by_key(|setting| {
        HEADINGS.iter().position(|heading| *heading == setting.heading).unwrap_or(HEADINGS.len())
    });
    declared
}

/// Fails when the value of an unknown key is read. An error at that point includes the key's path and source.
struct UnknownKey<'a, S>(&'a str, PhantomData<S>);

impl<'de, S: Settings> DeserializeSeed<'de> for UnknownKey<'_, S> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, _: D) -> Result<(), D::Error> {
        Err(D::Error::unknown_field(self.0, S::keys()))
    }
}

/// Checks a number against its setting's range. `prefix` goes before the name in an error.
pub fn check_range(
    prefix: &str,
    name: &str,
    number: Option<u64>,
    (min, max): (u64, u64),
) -> Result<(), Invalid> {
    let Some(number) = number else { return Ok(()) };
    let message = if number < min {
        format!("is {number}, but must be at least {min}")
    } else if number > max {
        format!("is {number}, the limit is {max}")
    } else {
        return Ok(());
    };
    Err(Invalid::new(format!("{prefix}{name}"), message))
}

/// Joins the lines of a doc comment.
pub fn join_lines(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// Declares an enum of names. Its first variant is the default.
macro_rules! choices {
    (
        $(#[doc = $doc:literal])+
        pub enum $type:ident { $( $(#[doc = $variant_doc:literal])+ $variant:ident = $name:literal, )+ }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $type { $( $(#[doc = $variant_doc])+ #[serde(rename = $name)] $variant, )+ }

        impl $type {
            /// All variants, in order.
            pub const ALL: &[Self] = &[$( Self::$variant, )+];
            const CHOICES: &[$crate::Choice] =
                &[$( $crate::Choice { name: $name, help: concat!($( $variant_doc, )+) }, )+];

            /// The name on the command line, in files and on the wire.
            pub fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }
        }

        impl Default for $type {
            fn default() -> Self {
                Self::ALL[0]
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl $crate::value::Value for $type {
            const KIND: $crate::Kind = $crate::Kind::Choice(Self::CHOICES);

            fn written(&self) -> Option<String> {
                Some(self.name().to_owned())
            }
        }
    };
}

/// Declares a group of settings, under one or more headings of `--help`.
///
/// Each setting is `name: type = default`, followed by any of these, in this order: `unit "UNIT"`, `default "in
/// words"`, `at least N`, `at most N`, `changes live`. The doc comment is the help. `table "NAME"` after the struct's
/// name says that the keys stand in a table of the file and have no flags, except settings that end in `also a flag`.
/// `errors "PREFIX"` sets the prefix of the keys in errors.
macro_rules! settings {
    (
        $(#[doc = $doc:literal])+
        pub struct $type:ident $(, table $table:literal, errors $prefix:literal)? {
            $( $heading:literal => {
                $(
                    $(#[doc = $help:literal])+
                    $field:ident : $value:ty = $default:expr
                    $(, unit $unit:literal)?
                    $(, default $text:literal)?
                    $(, at least $min:literal)?
                    $(, at most $max:expr)?
                    $(, changes $live:ident)?
                    $(, also a $flag:ident)?
                    ;
                )+
            } )+
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
        pub struct $type { $( $( $(#[doc = $help])+ pub $field: $value, )+ )+ }

        impl Default for $type {
            fn default() -> Self {
                Self { $( $( $field: $default, )+ )+ }
            }
        }

        impl $crate::Settings for $type {
            fn declared() -> Vec<$crate::Setting> {
                const TABLE: Option<&str> = settings!(@option $( $table )?);
                let defaults = Self::default();
                vec![$( $( $crate::Setting {
                    name: stringify!($field),
                    table: TABLE,
                    heading: $heading,
                    help: $crate::declare::join_lines(&[$( $help, )+]),
                    kind: <$value as $crate::value::Value>::KIND,
                    unit: settings!(@option $( $unit )?),
                    default: settings!(@option $( $text )?)
                        .map(str::to_owned)
                        .or_else(|| $crate::value::Value::written(&defaults.$field)),
                    range: settings!(@range [$( $min )?] [$( $max )?]),
                    is_flag: TABLE.is_none() || settings!(@given $( $flag )?),
                    is_live: settings!(@given $( $live )?),
                }, )+ )+]
            }

            fn keys() -> &'static [&'static str] {
                &[$( $( stringify!($field), )+ )+]
            }

            fn set<'de, A: serde::de::MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
                match key {
                    $( $( stringify!($field) => self.$field = $crate::value::Value::read(map)?, )+ )+
                    _ => return Ok(false),
                }
                Ok(true)
            }

            fn check_ranges(&self) -> Result<(), $crate::Invalid> {
                const PREFIX: &str = concat!($( $prefix )?);
                $( $( $crate::declare::check_range(
                    PREFIX,
                    stringify!($field),
                    $crate::value::Value::number(&self.$field),
                    settings!(@range [$( $min )?] [$( $max )?]),
                )?; )+ )+
                Ok(())
            }

            fn change_to(&mut self, new: &Self, changes: &mut $crate::Changes) {
                const TABLE: Option<&str> = settings!(@option $( $table )?);
                $( $( if self.$field != new.$field {
                    if settings!(@given $( $live )?) {
                        changes.live(TABLE, stringify!($field), &self.$field, &new.$field);
                        self.$field = new.$field.clone();
                    } else {
                        changes.needs_restart(TABLE, stringify!($field));
                    }
                } )+ )+
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::declare::deserialize(deserializer)
            }
        }
    };
    (@option) => { None::<&str> };
    (@option $value:literal) => { Some($value) };
    (@range [$( $min:literal )?] [$( $max:expr )?]) => {
        (settings!(@or 0, $( $min )?), settings!(@or u64::MAX, $( $max )?))
    };
    (@or $other:expr, ) => { $other };
    (@or $other:expr, $value:expr) => { $value };
    (@given) => { false };
    (@given $word:ident) => { true };
}

/// Declares the settings of a process: groups whose keys are at the top level, and groups with a table each.
macro_rules! process {
    (
        $(#[doc = $doc:literal])+
        pub struct $type:ident {
            $( $(#[doc = $group_doc:literal])+ $group:ident : $group_type:ty, )+
            tables: $( $(#[doc = $table_doc:literal])+ $table:ident : $table_type:ty, )*
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $type {
            $( $(#[doc = $group_doc])+ #[serde(flatten)] pub $group: $group_type, )+
            $( $(#[doc = $table_doc])+ pub $table: $table_type, )*
        }

        impl $crate::Settings for $type {
            fn declared() -> Vec<$crate::Setting> {
                let mut declared = Vec::new();
                $( declared.extend(<$group_type>::declared()); )+
                $( declared.extend(<$table_type>::declared()); )*
                $crate::declare::in_order(declared)
            }

            fn keys() -> &'static [&'static str] {
                static KEYS: std::sync::LazyLock<Vec<&'static str>> = std::sync::LazyLock::new(|| {
                    let mut keys = Vec::new();
                    $( keys.extend(<$group_type>::keys()); )+
                    $( keys.push(stringify!($table)); )*
                    keys
                });
                &KEYS
            }

            fn set<'de, A: serde::de::MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
                $( if self.$group.set(key, map)? { return Ok(true); } )+
                match key {
                    $( stringify!($table) => self.$table = map.next_value()?, )*
                    _ => return Ok(false),
                }
                #[allow(unreachable_code, reason = "a process may have no tables")]
                Ok(true)
            }

            fn check_ranges(&self) -> Result<(), $crate::Invalid> {
                $( self.$group.check_ranges()?; )+
                $( self.$table.check_ranges()?; )*
                Ok(())
            }

            fn change_to(&mut self, new: &Self, changes: &mut $crate::Changes) {
                $( self.$group.change_to(&new.$group, changes); )+
                $( self.$table.change_to(&new.$table, changes); )*
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::declare::deserialize(deserializer)
            }
        }
    };
}
