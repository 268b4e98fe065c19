//! Python's conventions in templates: methods of texts, white space and JSON.

use jiff::tz::TimeZone;
use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Kwargs, ValueKind, from_args},
};
use serde::Serialize;
use serde_json::ser::Formatter;

/// Maximum width to which a text is filled up.
const MAX_WIDTH: usize = 4096;

/// Adds the functions, filters and methods that Hugging Face's transformers and Python have to an environment.
pub fn add(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// True for Python's white space, which has four characters more than Unicode's.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Python's `text.strip()`.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Python's methods: those whose meaning differs in minijinja's collection, or that it lacks, and then its own.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.as_str() {
        Some(text) => method_of_text(text, name, args)?,
        None if value.kind() == ValueKind::Seq && name == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            Some(Value::from(at.ok_or_else(|| failed("the list has no such item"))?))
        }
        None if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) && name == "copy" => {
            Some(value.clone())
        }
        None => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn method_of_text(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let is_of = |chars: Option<&str>| {
        let chars: Option<Vec<char>> = chars.map(|chars| chars.chars().collect());
        move |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c))
    };
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let is_of = is_of(chars);
            Value::from(match name {
                "strip" => text.trim_matches(is_of),
                "lstrip" => text.trim_start_matches(is_of),
                _ => text.trim_end_matches(is_of),
            })
        }
        "split" | "rsplit" => {
            let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.or(named.get("sep")?);
            let most = most.or(named.get("maxsplit")?).and_then(|most| usize::try_from(most).ok());
            named.assert_all_used()?;
            if separator == Some("") {
                return Err(failed("empty separator"));
            }
            Value::from(if name == "split" {
                split(text, separator, most)
            } else {
                rsplit(text, separator, most)
            })
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let from_start = name == "partition";
            let found = if from_start { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if from_start => [text, "", ""],
                None => ["", "", text],
            };
            Value::from(parts.map(str::to_owned).to_vec())
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            Value::from(lines(text, keep.unwrap_or(false)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            Value::from(fill_up(text, name, width, fill.unwrap_or(" "))?)
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = match text.chars().next() {
                Some(sign @ ('+' | '-')) => (sign.to_string(), &text[1..]),
                _ => (String::new(), text),
            };
            Value::from(sign.clone() + &fill_up(digits, "rjust", width.saturating_sub(sign.len()), "0")?)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let at = if name == "index" { text.find(part) } else { text.rfind(part) };
            Value::from(text[..at.ok_or_else(|| failed("substring not found"))?].chars().count())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase().replace('ß', "ss"))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| {
                if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(is_space))
        }
        _ => return Ok(None),
    }))
}

fn failed(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Splits at a separator, or at white space, at most `most` times.
fn split(text: &str, separator: Option<&str>, most: Option<usize>) -> Vec<String> {
    let most = most.unwrap_or(usize::MAX);
    if let Some(separator) = separator {
        return text.splitn(most.saturating_add(1), separator).map(str::to_owned).collect();
    }
    let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_space));
    while !rest.is_empty() {
        let end = if parts.len() < most { rest.find(is_space) } else { None };
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(part.to_owned());
        rest = after.trim_start_matches(is_space);
    }
    parts
}

/// As [`split`], from the end.
fn rsplit(text: &str, separator: Option<&str>, most: Option<usize>) -> Vec<String> {
    let most = most.unwrap_or(usize::MAX);
    let mut parts: Vec<String> = Vec::new();
    if let Some(separator) = separator {
        parts.extend(text.rsplitn(most.saturating_add(1), separator).map(str::to_owned));
    } else {
        let mut rest = text.trim_end_matches(is_space);
        while !rest.is_empty() {
            let start = if parts.len() < most { rest.rfind(is_space) } else { None };
            let start = start.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
            let (before, part) = rest.split_at(start);
            parts.push(part.to_owned());
            rest = before.trim_end_matches(is_space);
        }
    }
    parts.reverse();
    parts
}

/// Python's `splitlines`, which knows more ends of lines than `\n`.
fn lines(text: &str, keep: bool) -> Vec<String> {
    let is_end = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let length = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(rest[..if keep { at + length } else { at }].to_owned());
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

/// Fills a text up to a width in characters.
fn fill_up(text: &str, side: &str, width: usize, fill: &str) -> Result<String, Error> {
    if fill.chars().count() != 1 {
        return Err(failed("the fill must be one character"));
    }
    if width > MAX_WIDTH {
        return Err(failed(format!("the width is {width}, but may be at most {MAX_WIDTH}")));
    }
    let missing = width.saturating_sub(text.chars().count());
    // Python puts the odd character of a centred text to the left if the width is odd.
    let left = match side {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    Ok([&fill.repeat(left), text, &fill.repeat(missing - left)].concat())
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(failed(message))
}

/// The current time in UTC, in `strftime`'s format.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = jiff::Timestamp::now().to_zoned(TimeZone::UTC);
    jiff::fmt::strtime::format(format, &now).map_err(|e| failed(format!("strftime_now: {e}")))
}

/// Jinja's `length`, which is 0 for undefined.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| failed(format!("a value of type {} has no length", value.kind())))
}

/// Jinja's `trim`, with Python's white space.
fn trim(value: Value, chars: Option<String>) -> Value {
    // Jinja trims the text of any value; undefined has none.
    let text = if value.is_undefined() { String::new() } else { value.to_string() };
    Value::from(match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => strip(&text).to_owned(),
    })
}

/// Python's `json.dumps(value, ensure_ascii=False)` of an object.
pub fn json(object: &serde_json::Map<String, serde_json::Value>) -> String {
    let style = PythonJson {
        item: ", ".to_owned(),
        member: ": ".to_owned(),
        indent: None,
        ascii: false,
        depth: 0,
        has_items: false,
    };
    let mut text = Vec::new();
    // Writing a map of values into memory does not fail.
    let _ = object.serialize(&mut serde_json::Serializer::with_formatter(&mut text, style));
    String::from_utf8(text).unwrap_or_default()
}

/// Python's `json.dumps(value, ensure_ascii=False)`. It replaces minijinja's own filter, which escapes for HTML.
fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut tree = serde_json::to_value(&value).map_err(failed)?;
    if sorted == Some(true) {
        tree.sort_all_objects();
    }
    let (item, member) = match separators.as_deref() {
        Some([item, member]) => (item.clone(), member.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two texts")),
        None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    let style = PythonJson {
        item,
        member,
        indent: indent.map(|width| width.min(16)),
        ascii: ensure_ascii == Some(true),
        depth: 0,
        has_items: false,
    };
    let mut text = Vec::new();
    tree.serialize(&mut serde_json::Serializer::with_formatter(&mut text, style)).map_err(failed)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&text).into_owned()))
}

/// Writes JSON as Python's `json.dumps`.
struct PythonJson {
    /// Between the items of a list or the members of an object.
    item: String,
    /// Behind a member's name.
    member: String,
    /// Spaces per level; `None` for one line.
    indent: Option<usize>,
    /// True if other characters than ASCII are escaped.
    ascii: bool,
    depth: usize,
    has_items: bool,
}

impl PythonJson {
    fn open<W: ?Sized + std::io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        out.write_all(bracket)
    }

    fn begin<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.new_line(out)
    }

    fn close<W: ?Sized + std::io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth -= 1;
        if std::mem::replace(&mut self.has_items, true) {
            self.new_line(out)?;
        }
        out.write_all(bracket)
    }

    fn new_line<W: ?Sized + std::io::Write>(&self, out: &mut W) -> std::io::Result<()> {
        match self.indent {
            Some(width) => out.write_all(format!("\n{}", " ".repeat(width * self.depth)).as_bytes()),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonJson {
    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> std::io::Result<()> {
        if !self.ascii {
            // Python leaves U+007F as it is here, and escapes it with `ensure_ascii`.
            return out.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if c.is_ascii() && c != '\x7f' {
                out.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.write_all(format!("\\u{unit:04x}").as_bytes())?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin(out, first)
    }

    fn end_array_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin(out, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.member.as_bytes())
    }

    fn end_object_value<W: ?Sized + std::io::Write>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
