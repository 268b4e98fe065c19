//! The file of API keys: one line per key.
//!
//! ```text
//! # name   SHA-256 of the key, in hexadecimal      limits, and the right of an operator
//! alice    2bd806c97f0e00af1a1fc3328fa763a9…      concurrent=8 requests-per-minute=60
//! batch    fcde2b2edba56bf408601fb721fe9b5c…      tokens-per-minute=1000000
//! oncall   9f86d081884c7d659a2feaa0c55ad015…      operator
//! ```
//!
//! A name has letters, digits, `-`, `_` and `.`, and appears in logs and metrics. A limit that a line leaves out does
//! not apply.

use std::collections::HashMap;

use tutti_proto::parameters::{MAX_PRIORITY, PRIORITY};

/// Length of a SHA-256 hash in bytes.
pub const HASH_BYTES: usize = 32;
/// Maximum number of keys per file. Further lines are left out.
const MAX_KEYS: usize = 10_000;
/// Maximum length of a name in bytes.
const MAX_NAME_BYTES: usize = 64;

/// The word that gives a key the right of an operator.
const OPERATOR: &str = "operator";

/// One key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyLine {
    /// The name.
    pub name: String,
    /// SHA-256 of the key.
    pub hash: [u8; HASH_BYTES],
    /// Maximum number of choices that run at once.
    pub concurrent: Option<u32>,
    /// Maximum number of requests per minute.
    pub requests_per_minute: Option<u32>,
    /// Maximum number of tokens per minute, of prompts and outputs.
    pub tokens_per_minute: Option<u32>,
    /// The lowest, and so most urgent, `priority` that the key's requests may have.
    pub most_urgent: Option<i32>,
    /// True if the key's holder may cancel requests of others.
    pub operator: bool,
}

/// The keys of a file, and its lines with mistakes.
#[derive(Debug, Default)]
pub struct KeyFile {
    /// The keys, in the order of the file.
    pub keys: Vec<KeyLine>,
    /// One sentence for each line that is left out, with the line's number from 1.
    pub mistakes: Vec<String>,
}

/// Parses a file. A line with a mistake is left out, and the other lines take effect. So a mistake never keeps a
/// removed key in force.
pub fn parse(bytes: &[u8]) -> KeyFile {
    let (mut file, mut names, mut hashes) = (KeyFile::default(), HashMap::new(), HashMap::new());
    for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
        match parse_line(line) {
            Ok(None) => {}
            Err(mistake) => file.mistakes.push(format!("line {number} {mistake}")),
            Ok(Some(_)) if file.keys.len() == MAX_KEYS => {
                file.mistakes.push(format!("line {number} is left out: the limit is {MAX_KEYS} keys"));
            }
            Ok(Some(key)) => {
                let same = [("name", names.get(&key.name)), ("key", hashes.get(&key.hash))];
                if let Some((what, Some(other))) = same.into_iter().find(|(_, other)| other.is_some()) {
                    file.mistakes.push(format!("line {number} has the {what} of {other}"));
                    continue;
                }
                names.insert(key.name.clone(), key.name.clone());
                hashes.insert(key.hash, key.name.clone());
                file.keys.push(key);
            }
        }
    }
    file
}

/// Parses a line. `None` if the line is blank or only a comment.
fn parse_line(line: &[u8]) -> Result<Option<KeyLine>, String> {
    let line = std::str::from_utf8(line).map_err(|_| "is not UTF-8 text".to_owned())?;
    let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
    match &words[..] {
        [] => Ok(None),
        [_] => Err("has a name, but no hash".into()),
        [name, hash, limits @ ..] => {
            parse_key(name, hash, limits).map(Some).map_err(|problem| format!("is no key: {problem}"))
        }
    }
}

fn parse_key(name: &str, hash: &str, limits: &[&str]) -> Result<KeyLine, String> {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.len() > MAX_NAME_BYTES || !name.chars().all(known) {
        return Err(format!("the name must be at most {MAX_NAME_BYTES} letters, digits, '-', '_' or '.'"));
    }
    // The error does not repeat the hash, because someone may have written the key itself in its place.
    let hash = parse_hash(hash)
        .ok_or_else(|| format!("{name} needs the SHA-256 of its key, 64 hexadecimal digits"))?;
    let mut key = KeyLine {
        name: name.into(),
        hash,
        concurrent: None,
        requests_per_minute: None,
        tokens_per_minute: None,
        most_urgent: None,
        operator: false,
    };
    for limit in limits {
        if *limit == OPERATOR {
            if std::mem::replace(&mut key.operator, true) {
                return Err(format!("{OPERATOR} must be given once"));
            }
            continue;
        }
        let (what, number) = limit
            .split_once('=')
            .ok_or_else(|| format!("{limit:?} is neither LIMIT=NUMBER nor {OPERATOR}"))?;
        if what == "most-urgent" {
            let priority = number.parse().ok().filter(|priority| PRIORITY.check(*priority).is_ok());
            let priority = priority.ok_or_else(|| {
                format!("{what} is {number:?}, but must be a priority, -{MAX_PRIORITY} to {MAX_PRIORITY}")
            })?;
            if key.most_urgent.replace(priority).is_some() {
                return Err(format!("{what} must be given once"));
            }
            continue;
        }
        let slot = match what {
            "concurrent" => &mut key.concurrent,
            "requests-per-minute" => &mut key.requests_per_minute,
            "tokens-per-minute" => &mut key.tokens_per_minute,
            _ => {
                let known = "concurrent, requests-per-minute, tokens-per-minute, most-urgent";
                return Err(format!("there is no limit {what:?}; there are {known}"));
            }
        };
        let value: u32 = number.parse().map_err(|_| format!("{what} is {number:?}, but must be a number"))?;
        if value == 0 || slot.replace(value).is_some() {
            return Err(format!("{what} must be at least 1, and given once"));
        }
    }
    Ok(key)
}

fn parse_hash(hash: &str) -> Option<[u8; HASH_BYTES]> {
    if hash.len() != 2 * HASH_BYTES || !hash.is_ascii() {
        return None;
    }
    let mut bytes = [0; HASH_BYTES];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hash[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests;
