//! Decoding errors, in YAML's terms instead of Rust's.

use std::fmt::Display;

use serde::de::{self, Expected, Unexpected};

use super::suggest::closest_match;
use super::{Position, YamlError, join, key_step};
use crate::diagnostic::Code;

/// While an error propagates, each level prepends its step to the field, and the innermost position is kept.
impl YamlError {
    pub(super) fn new(code: Code, field: &str, reason: String) -> Self {
        Self { position: Position::default(), field: field.to_owned(), reason, code }
    }

    pub(super) fn at(mut self, position: Position) -> Self {
        if self.position == Position::default() {
            self.position = position;
        }
        self
    }

    pub(super) fn below(mut self, step: &str) -> Self {
        self.field = join(step, &self.field);
        self
    }
}

impl de::Error for YamlError {
    /// Types whose text has a form of its own, e.g. prefixes, report through this.
    fn custom<T: Display>(message: T) -> Self {
        Self::new(Code::MalformedValue, "", message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(Code::WrongType, "", mismatch(found, expected))
    }

    /// The right type, but e.g. a number that has too many bits.
    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let is_number = matches!(found, Unexpected::Unsigned(_) | Unexpected::Signed(_) | Unexpected::Float(_));
        let code = if is_number { Code::OutOfRange } else { Code::MalformedValue };
        Self::new(code, "", mismatch(found, expected))
    }

    /// A list instead of a map.
    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::new(Code::WrongType, "", format!("invalid length {length}, expected {expected}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let reason = format!("unknown value `{variant}`, expected {}{}", one_of(expected), hint(variant, expected));
        Self::new(Code::UnknownValue, "", reason)
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let known = match expected {
            [] => "no fields are supported here".into(),
            _ => format!("known fields: {}", all(expected)),
        };
        Self::new(Code::UnknownField, &key_step(field), format!("unknown field{}; {known}", hint(field, expected)))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(Code::MissingField, &key_step(field), "is missing".into())
    }
}

fn mismatch(found: Unexpected<'_>, expected: &dyn Expected) -> String {
    format!("expected {}, found {}", expectation(expected), describe(found))
}

fn hint(name: &str, known: &[&str]) -> String {
    closest_match(name, known).map(|similar| format!(", did you mean `{similar}`?")).unwrap_or_default()
}

pub(super) fn all(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

pub(super) fn one_of(names: &[&str]) -> String {
    match names {
        [one] => format!("`{one}`"),
        [rest @ .., last] => format!("{} or `{last}`", all(rest)),
        [] => "nothing".into(),
    }
}

/// What a visitor expects, in YAML's terms.
fn expectation(expected: &dyn Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "u8" => "a whole number from 0 to 255".into(),
        "u16" => "a whole number from 0 to 65535".into(),
        "u32" => "a whole number from 0 to 4294967295".into(),
        "a nonzero u32" => "a whole number from 1 to 4294967295".into(),
        "u64" | "usize" => "a whole number, not negative".into(),
        "i32" | "i64" => "a whole number".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "path string" => "a path".into(),
        // Visitors of structs expect the Rust type by name; a type name has no spaces.
        text if text.starts_with("struct ") || !text.contains(' ') => "a map".into(),
        _ => text,
    }
}

/// The value found, in YAML's terms.
pub(super) fn describe(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Unit | Unexpected::Option => "nothing".into(),
        Unexpected::Bool(value) => format!("`{value}`"),
        Unexpected::Unsigned(value) => format!("`{value}`"),
        Unexpected::Signed(value) => format!("`{value}`"),
        Unexpected::Float(value) => format!("`{value}`"),
        Unexpected::Str(value) => format!("`{value}`"),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a map".into(),
        other => other.to_string(),
    }
}
