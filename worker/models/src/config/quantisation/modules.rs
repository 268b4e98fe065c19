//! Lists of modules in a `quantization_config`: names, regular expressions and classes.

use regex::Regex;

/// Prefix of an entry that is a regular expression.
const REGEX: &str = "re:";
/// The class of linear layers in PyTorch.
const LINEAR: &str = "Linear";

/// Maximum bytes of a compiled regular expression.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Maximum number of regular expressions of a list.
const MAX_EXPRESSIONS: usize = 1024;

/// The most specific entry of a list that a module matches. Later variants take precedence, as in compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// The class of linear layers.
    Class,
    /// A regular expression.
    Expression,
    /// The module's name, or a part of it.
    Name,
}

/// A list of modules.
#[derive(Clone, Debug, Default)]
pub(super) struct Modules {
    names: Vec<String>,
    expressions: Vec<Regex>,
    linear: bool,
}

impl Modules {
    /// All linear layers.
    pub fn all() -> Self {
        Self { linear: true, ..Self::default() }
    }

    /// Parses the entries of a list. The error names the entry.
    pub fn parse(entries: &[String]) -> Result<Self, String> {
        let mut modules = Self::default();
        for entry in entries {
            match entry.strip_prefix(REGEX) {
                Some(_) if modules.expressions.len() == MAX_EXPRESSIONS => {
                    return Err(format!("has more than {MAX_EXPRESSIONS} regular expressions"));
                }
                Some(expression) => {
                    // As in Python's `re.match`, an expression matches from the name's start.
                    let anchored = format!("^(?:{expression})");
                    let compiled = regex::RegexBuilder::new(&anchored).size_limit(MAX_REGEX_BYTES).build();
                    let compiled = compiled
                        .map_err(|_| format!("{entry:?} is no regular expression that is supported"))?;
                    modules.expressions.push(compiled);
                }
                None if entry == LINEAR => modules.linear = true,
                None => modules.names.push(entry.clone()),
            }
        }
        Ok(modules)
    }

    /// Returns the most specific entry that a linear layer matches. A name also matches all modules inside the module
    /// of that name, and modules whose name ends with it.
    pub fn best(&self, module: &str) -> Option<Target> {
        if self.names.iter().any(|name| is_part(name, module)) {
            Some(Target::Name)
        } else if self.expressions.iter().any(|expression| expression.is_match(module)) {
            Some(Target::Expression)
        } else {
            self.linear.then_some(Target::Class)
        }
    }
}

/// True if `name` is a run of whole components of `module`.
fn is_part(name: &str, module: &str) -> bool {
    let name = name.trim_end_matches('*').trim_end_matches('.');
    module.match_indices(name).any(|(at, _)| {
        let before = at == 0 || module[..at].ends_with('.');
        let behind = &module[at + name.len()..];
        !name.is_empty() && before && (behind.is_empty() || behind.starts_with('.'))
    })
}
