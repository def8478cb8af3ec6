//! Why a tree is no value of a type, in the words of somebody who writes YAML.

use std::fmt::{self, Display};

use serde::de::{self, Expected, Unexpected};

use super::suggest::nearest;
use super::{Position, join, key_step};

/// A failure on its way up: each level adds its step to the field, the innermost one that knows sets the place.
#[derive(Debug)]
pub struct DecodeError {
    pub(super) at: Option<Position>,
    pub(super) field: String,
    pub(super) reason: String,
}

impl DecodeError {
    pub(super) fn new(field: &str, reason: String) -> Self {
        Self { at: None, field: field.to_owned(), reason }
    }

    pub(super) fn at(mut self, at: Position) -> Self {
        self.at.get_or_insert(at);
        self
    }

    pub(super) fn below(mut self, step: &str) -> Self {
        self.field = join(step, &self.field);
        self
    }
}

impl Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<T: Display>(message: T) -> Self {
        Self::new("", message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new("", format!("expected {}, found {}", expectation(expected), finding(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new("", format!("unknown value `{variant}`, expected {}{}", one_of(expected), hint(variant, expected)))
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let known =
            if expected.is_empty() { "none are known here".into() } else { format!("known are {}", all(expected)) };
        Self::new(&key_step(field), format!("unknown field{}; {known}", hint(field, expected)))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(&key_step(field), "is missing".into())
    }
}

fn hint(word: &str, known: &[&str]) -> String {
    nearest(word, known).map(|near| format!(", did you mean `{near}`?")).unwrap_or_default()
}

pub(super) fn all(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

pub(super) fn one_of(words: &[&str]) -> String {
    match words {
        [one] => format!("`{one}`"),
        [rest @ .., last] => format!("{} or `{last}`", all(rest)),
        [] => "nothing".into(),
    }
}

/// What a visitor wants, in the words of somebody who writes YAML.
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
        // Visitors of structs name the type, which is of no use outside; a type's name has no blank in it.
        text if text.starts_with("struct ") || !text.contains(' ') => "a map".into(),
        _ => text,
    }
}

pub(super) fn finding(found: Unexpected<'_>) -> String {
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
