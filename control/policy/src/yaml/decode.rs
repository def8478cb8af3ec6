//! Trees to types: a `serde` deserializer whose errors have position and field.

use serde::Deserialize;
use serde::de::value::{BorrowedStrDeserializer, StrDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, Unexpected, VariantAccess,
    Visitor,
};

use super::error::{all, describe, one_of};
use super::{Entry, Node, Value, YamlError, key_step};
use crate::diagnostic::Code;

/// Deserializes a `T` from a tree.
///
/// # Errors
/// The first error, with position and field.
pub fn decode<'de, T: Deserialize<'de>>(node: &'de Node) -> Result<T, YamlError> {
    T::deserialize(node).map_err(|error| error.at(node.position))
}

impl Node {
    fn unexpected(&self) -> Unexpected<'_> {
        match &self.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Negative(value) => Unexpected::Signed(*value),
            Value::Number(value) => Unexpected::Unsigned(*value),
            Value::Float(value) => Unexpected::Float(*value),
            Value::Text(value) => Unexpected::Str(value),
            Value::List(_) => Unexpected::Seq,
            Value::Map(_) => Unexpected::Map,
        }
    }
}

impl<'de> Deserializer<'de> for &'de Node {
    type Error = YamlError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, YamlError> {
        match &self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Negative(value) => visitor.visit_i64(*value),
            Value::Number(value) => visitor.visit_u64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(items) => visitor.visit_seq(Items { items, next: 0 }),
            Value::Map(entries) => visitor.visit_map(Entries { entries, next: 0 }),
        }
        .map_err(|error: YamlError| error.at(self.position))
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, YamlError> {
        match &self.value {
            Value::Bool(_) | Value::Negative(_) | Value::Number(_) | Value::Float(_) => {
                let found = describe(self.unexpected());
                let reason = format!("expected text, found {found}: put it in quotes");
                Err(YamlError::new(Code::TextNeedsQuotes, "", reason).at(self.position))
            }
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, YamlError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, YamlError> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
        .map_err(|error: YamlError| error.at(self.position))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, YamlError> {
        visitor.visit_newtype_struct(self).map_err(|error: YamlError| error.at(self.position))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, YamlError> {
        match &self.value {
            Value::Text(variant) => visitor.visit_enum(variant.as_str().into_deserializer()),
            Value::Map(entries) => {
                if let [entry] = entries.as_slice() {
                    visitor.visit_enum(Variant(entry))
                } else {
                    let found = entries.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>();
                    let found = if found.is_empty() { "none".into() } else { all(&found) };
                    let reason = format!("expected exactly one of {}, found {found}", one_of(variants));
                    Err(YamlError::new(Code::NotExactlyOne, "", reason))
                }
            }
            _ => {
                let found = describe(self.unexpected());
                Err(YamlError::new(Code::WrongType, "", format!("expected {}, found {found}", one_of(variants))))
            }
        }
        .map_err(|error: YamlError| error.at(self.position))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, YamlError> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf
        unit unit_struct seq tuple tuple_struct map struct identifier
    }
}

struct Items<'de> {
    items: &'de [Node],
    next: usize,
}

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = YamlError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, YamlError> {
        let Some(item) = self.items.get(self.next) else { return Ok(None) };
        let index = self.next;
        self.next += 1;
        seed.deserialize(item).map(Some).map_err(|error| error.at(item.position).below(&format!("[{index}]")))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len() - self.next)
    }
}

struct Entries<'de> {
    entries: &'de [Entry],
    next: usize,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = YamlError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, YamlError> {
        let Some(entry) = self.entries.get(self.next) else { return Ok(None) };
        seed.deserialize(BorrowedStrDeserializer::<YamlError>::new(&entry.key)).map(Some).map_err(|error| {
            let error = error.at(entry.key_position);
            if error.field.is_empty() { error.below(&key_step(&entry.key)) } else { error }
        })
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, YamlError> {
        let entry = &self.entries[self.next];
        self.next += 1;
        seed.deserialize(&entry.node).map_err(|error| error.at(entry.node.position).below(&key_step(&entry.key)))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.entries.len() - self.next)
    }
}

/// A map with one entry as an enum variant: the key is its name, the value its data.
struct Variant<'de>(&'de Entry);

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = YamlError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), YamlError> {
        let key: StrDeserializer<'_, YamlError> = self.0.key.as_str().into_deserializer();
        let variant =
            seed.deserialize(key).map_err(|error| error.at(self.0.key_position).below(&key_step(&self.0.key)))?;
        Ok((variant, self))
    }
}

impl Variant<'_> {
    fn locate(&self, error: YamlError) -> YamlError {
        error.at(self.0.node.position).below(&key_step(&self.0.key))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = YamlError;

    fn unit_variant(self) -> Result<(), YamlError> {
        <()>::deserialize(&self.0.node).map_err(|error| self.locate(error))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, YamlError> {
        seed.deserialize(&self.0.node).map_err(|error| self.locate(error))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, YamlError> {
        self.0.node.deserialize_any(visitor).map_err(|error| self.locate(error))
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, YamlError> {
        self.0.node.deserialize_any(visitor).map_err(|error| self.locate(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, rename_all = "camelCase")]
    struct Sample {
        port: u16,
        #[serde(default)]
        labels: std::collections::BTreeMap<String, String>,
        #[serde(default)]
        parts: Vec<Part>,
        source: Option<Origin>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Part {
        name: String,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "lowercase")]
    enum Origin {
        Files(Vec<String>),
        Server { url: String },
        Nowhere,
    }

    fn sample(text: &str) -> Result<Sample, YamlError> {
        let (nodes, faults) = super::super::read(text);
        assert_eq!(faults, []);
        decode(&nodes[0])
    }

    /// Text, line, field, code, and a part of the reason.
    const INVALID: [(&str, u32, &str, Code, &str); 15] = [
        ("{}", 1, "port", Code::MissingField, "is missing"),
        ("port: 70000", 1, "port", Code::OutOfRange, "expected a whole number from 0 to 65535, found `70000`"),
        ("port: x", 1, "port", Code::WrongType, "expected a whole number from 0 to 65535, found `x`"),
        ("port: 1\nportt: 2", 2, "portt", Code::UnknownField, "unknown field, did you mean `port`?; known fields: "),
        ("port: 1\nlabels:\n  a.b/c: 7", 3, "labels[a.b/c]", Code::TextNeedsQuotes, "expected text, found `7`: put it"),
        ("port: 1\nparts:\n- name: x\n- nmae: y", 4, "parts[1].nmae", Code::UnknownField, "did you mean `name`?"),
        ("port: 1\nparts:\n- name: x\n- {}", 4, "parts[1].name", Code::MissingField, "is missing"),
        ("port: 1\nparts: x", 2, "parts", Code::WrongType, "expected a list, found `x`"),
        ("port: 1\nparts: [7]", 2, "parts[0]", Code::WrongType, "expected a map, found `7`"),
        (
            "port: 1\nsource: {files: [], server: {}}",
            2,
            "source",
            Code::NotExactlyOne,
            "exactly one of `files`, `server` or `nowhere`",
        ),
        ("port: 1\nsource: 7", 2, "source", Code::WrongType, "expected `files`, `server` or `nowhere`, found `7`"),
        ("port: 1\nsource:\n  server:\n    url: 7", 4, "source.server.url", Code::TextNeedsQuotes, "expected text"),
        ("port: 1\nsource: fils", 2, "source", Code::UnknownValue, "did you mean `files`?"),
        ("port: 1\nsource:\n  fils: []", 3, "source.fils", Code::UnknownValue, "did you mean `files`?"),
        ("[1]", 1, "", Code::WrongType, "expected"),
    ];

    #[test]
    fn every_error_has_its_line_field_and_code() {
        for (text, line, field, code, reason) in INVALID {
            let error = sample(text).expect_err(text);
            assert_eq!((error.position.line, &*error.field, error.code), (line, field, code), "{text}: {error:?}");
            assert!(error.reason.contains(reason), "{text}: {error:?}");
        }
    }

    #[test]
    fn valid_values_are_decoded() {
        let got = sample("port: 1\nlabels: {a: \"7\"}\nparts: [{name: x}]\nsource: {server: {url: u}}").unwrap();
        assert_eq!(got.labels["a"], "7");
        assert_eq!(got.source, Some(Origin::Server { url: "u".into() }));
        assert_eq!(sample("{port: 1, source: nowhere}").unwrap().source, Some(Origin::Nowhere));
        assert_eq!(sample("{port: 1, source: ~}").unwrap().source, None);
    }
}
