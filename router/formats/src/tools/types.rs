//! The types that a JSON Schema allows, and text that is a value of one of them.

use std::ops::BitOr;

use serde_json::{Map, Value, value::RawValue};

/// Number of `$ref`, `anyOf` and the like that are followed into each other.
const MAX_REFERENCES: usize = 8;

/// A set of types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u8);

impl BitOr for Types {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Types {
    const NONE: Self = Self(0);
    /// Text, as it is.
    pub const TEXT: Self = Self(1);
    const INTEGER: Self = Self(1 << 1);
    const NUMBER: Self = Self(1 << 2);
    const BOOLEAN: Self = Self(1 << 3);
    const NULL: Self = Self(1 << 4);
    const OBJECT: Self = Self(1 << 5);
    const ARRAY: Self = Self(1 << 6);
    /// Any type.
    pub const ANY: Self = Self((1 << 7) - 1);

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// True if any text is a value.
    pub fn allow_text(self) -> bool {
        self.has(Self::TEXT)
    }

    /// True if the value streams as text.
    pub fn is_text(self) -> bool {
        self.0 & !Self::TEXT.0 == 0
    }

    /// The types that a schema allows. References are looked up in `root`. A schema that names no type allows text.
    pub fn of_schema(schema: &Value, root: &Map<String, Value>) -> Self {
        match schema.as_object().map_or(Self::NONE, |schema| Self::named(schema, root, MAX_REFERENCES)) {
            Self::NONE => Self::TEXT,
            types => types,
        }
    }

    fn named(schema: &Map<String, Value>, root: &Map<String, Value>, depth: usize) -> Self {
        let Some(depth) = depth.checked_sub(1) else { return Self::NONE };
        let all = |schemas: &mut dyn Iterator<Item = Self>| schemas.fold(Self::NONE, Self::bitor);
        match schema.get("type") {
            Some(Value::String(name)) => return Self::of_name(name),
            Some(Value::Array(names)) => {
                return all(&mut names.iter().filter_map(Value::as_str).map(Self::of_name));
            }
            _ => {}
        }
        if let Some(pointer) = schema.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'))
        {
            return target(root, pointer).map_or(Self::NONE, |target| Self::named(target, root, depth));
        }
        if let Some(value) = schema.get("const") {
            return Self::of_value(value);
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return all(&mut values.iter().map(Self::of_value));
        }
        ["anyOf", "oneOf", "allOf"]
            .iter()
            .filter_map(|key| schema.get(*key)?.as_array())
            .flatten()
            .filter_map(Value::as_object)
            .fold(Self::NONE, |types, schema| types | Self::named(schema, root, depth))
    }

    fn of_name(name: &str) -> Self {
        match name {
            "string" => Self::TEXT,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER | Self::INTEGER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            _ => Self::NONE,
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.is_f64() => Self::NUMBER,
            Value::Number(_) => Self::INTEGER,
            Value::String(_) => Self::TEXT,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// The JSON that a text is, if it is a value of one of these types besides text. The model's spelling of numbers,
    /// and the order of its keys, are kept. The words of Python for `true`, `false` and `null` are read too.
    pub fn read(self, text: &str) -> Option<String> {
        let text = match text.trim() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            text => text,
        };
        let json: &RawValue = serde_json::from_str(text).ok()?;
        let types = match json.get().as_bytes()[0] {
            b'{' => Self::OBJECT,
            b'[' => Self::ARRAY,
            b't' | b'f' => Self::BOOLEAN,
            b'n' => Self::NULL,
            b'"' => Self::NONE,
            _ if is_integer(json.get()) => Self::INTEGER,
            _ => Self::NUMBER,
        };
        self.has(types).then(|| json.get().to_owned())
    }
}

/// The schema to which a JSON pointer points.
fn target<'a>(root: &'a Map<String, Value>, pointer: &str) -> Option<&'a Map<String, Value>> {
    let Some(path) = pointer.strip_prefix('/') else { return pointer.is_empty().then_some(root) };
    let (name, rest) = path.split_at(path.find('/').unwrap_or(path.len()));
    root.get(&name.replace("~1", "/").replace("~0", "~"))?.pointer(rest)?.as_object()
}

/// True if a JSON number is integral by JSON Schema's definition: `5.0` is.
fn is_integer(number: &str) -> bool {
    !number.contains(['.', 'e', 'E']) || number.parse::<f64>().is_ok_and(|value| value.fract() == 0.0)
}
