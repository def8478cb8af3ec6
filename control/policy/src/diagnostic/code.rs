//! Codes of diagnostics: a stable number per kind of mistake, with a title, an explanation and often an example.

use std::fmt;

use serde::{Serialize, Serializer};

/// Defines [`Code`] and what is known about each code. An entry: name, number, title, explanation, and optionally an
/// example: its document, the wrong and the right text.
macro_rules! codes {
    (
        $(#[$meta:meta])*
        $(
            $name:ident = $number:literal, $title:literal, $explanation:literal
            $(, $document:literal: $wrong:literal => $right:literal)?;
        )+
    ) => {
        $(#[$meta])*
        pub enum Code {
            $(#[doc = concat!($title, ".")] $name = $number,)+
        }

        impl Code {
            /// All codes, ascending.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// A few words: the kind of mistake.
            pub fn title(self) -> &'static str {
                match self {
                    $(Self::$name => $title,)+
                }
            }

            /// What is wrong, why it matters, and how to mend it.
            pub fn explanation(self) -> &'static str {
                match self {
                    $(Self::$name => $explanation,)+
                }
            }

            /// An example, if a short one says more than words.
            pub fn example(self) -> Option<Example> {
                $($(
                    if self == Self::$name {
                        return Some(Example { document: $document, wrong: $wrong, right: $right });
                    }
                )?)+
                None
            }
        }
    };
}

mod table;

pub use self::table::Code;

/// A mistake and its correction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// The document that the texts are part of: `gateway.yaml`, `policyd.yaml` or a kind of manifests.
    pub document: &'static str,
    /// The mistake, in YAML.
    pub wrong: &'static str,
    /// The correction, in YAML.
    pub right: &'static str,
}

/// Areas of codes by their hundreds, ascending.
pub const AREAS: [(u16, &str); 7] = [
    (1, "YAML and single values"),
    (2, "Configuration files"),
    (3, "Manifests"),
    (4, "Egress policies, VIPs and pools"),
    (5, "Services"),
    (6, "Gateways and nodes"),
    (7, "Files, certificates and sources"),
];

impl Code {
    /// Its number: the area in the hundreds.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The code of a text like `VG0301`, `vg0301` or `0301`.
    pub fn parse(text: &str) -> Option<Self> {
        let prefix = text.get(..2).filter(|prefix| prefix.eq_ignore_ascii_case("VG"));
        let digits = prefix.map_or(text, |prefix| &text[prefix.len()..]);
        // `parse` alone would accept a sign.
        let is_number = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number: u16 = digits.parse().ok().filter(|_| is_number)?;
        Self::ALL.iter().copied().find(|code| code.number() == number)
    }
}

/// `VG0301`.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VG{:04}", self.number())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_ascending_and_explained() {
        assert!(Code::ALL.is_sorted_by(|a, b| a.number() < b.number()));
        for code in Code::ALL {
            assert!(AREAS.iter().any(|(area, _)| *area == code.number() / 100), "{code} has no area");
            let (title, text) = (code.title(), code.explanation());
            assert!((5..=60).contains(&title.len()) && !title.ends_with('.'), "{code}: {title}");
            let sentences = text.matches(". ").count() + 1;
            assert!((2..=6).contains(&sentences) && text.ends_with('.'), "{code}: {sentences} sentences: {text}");
            if let Some(Example { wrong, right, .. }) = code.example() {
                assert_ne!(wrong, right, "{code}");
            }
        }
    }

    /// Numbers are in scripts, logs and bookmarks: this list only grows.
    #[test]
    fn numbers_are_never_reassigned() {
        let numbered = |code: &Code| format!("{code} {code:?}");
        let now: Vec<String> = Code::ALL.iter().map(numbered).collect();
        let published: Vec<&str> = include_str!("code/published.txt").lines().collect();
        assert_eq!(now, published, "append new codes to published.txt; never change a line of it");
    }

    #[test]
    fn a_code_is_parsed_in_any_case_and_without_its_prefix() {
        for text in ["VG0301", "vg0301", "Vg0301", "0301"] {
            assert_eq!(Code::parse(text).map(|code| code.to_string()).as_deref(), Some("VG0301"), "{text}");
        }
        for text in ["", "VG", "301", "VG301", "VG00301", "VG9999", "VX0301", "VG+301", "été"] {
            assert_eq!(Code::parse(text), None, "{text}");
        }
    }
}
