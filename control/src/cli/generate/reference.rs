//! Reference sections of the documents, generated from the code.
//!
//! A section stands between two markers: `<!-- generated: config sessions -->` and `<!-- end of generated -->`. A test
//! fails if a committed section differs; `make docs-generated` rewrites it.

use std::fmt::Write;

use clap::ValueEnum;
use vipgate_dataplane::policy::limits::{self, Limit, Scope};
use vipgate_policy::diagnostic::{AREAS, Code, Example};
use vipgate_policy::manifest::schema::{KINDS, schema_of};

use super::fields::{self, Nested};
use crate::command_error::CommandError;
use crate::metrics::metrics_reference;
use crate::schema::{Published, document};

const START: &str = "<!-- generated: ";
const END: &str = "<!-- end of generated -->";

/// What a reference is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Reference {
    /// Fields of gateway.yaml; part: a top-level field
    Config,
    /// Fields of policyd.yaml
    Policyd,
    /// Fields of node.yaml
    Node,
    /// Fields of vipgate's kinds; part: a kind
    Manifests,
    /// Codes of diagnostics
    Diagnostics,
    /// Metrics of gateways and policy servers
    Metrics,
    /// Limits of a policy
    Limits,
}

impl Reference {
    /// The section in Markdown.
    fn render(self, part: Option<&str>) -> Result<String, CommandError> {
        match self {
            Self::Config => config(part),
            Self::Policyd => whole(part, || fields::table(&document(Published::PolicydYaml), "", Nested::Included)),
            Self::Node => whole(part, || fields::table(&document(Published::NodeYaml), "", Nested::Included)),
            Self::Manifests => manifests(part),
            Self::Diagnostics => whole(part, diagnostics),
            Self::Metrics => whole(part, metrics_reference),
            Self::Limits => whole(part, limits),
        }
    }
}

fn no_part(part: &str) -> CommandError {
    CommandError::runtime(format!("there is no part `{part}`"))
}

/// A reference without parts.
fn whole(part: Option<&str>, render: impl FnOnce() -> String) -> Result<String, CommandError> {
    part.map_or_else(|| Ok(render()), |part| Err(no_part(part)))
}

/// The top-level fields of gateway.yaml, or the fields below one of them.
fn config(part: Option<&str>) -> Result<String, CommandError> {
    let schema = document(Published::GatewayYaml);
    let Some(part) = part else { return Ok(fields::table(&schema, "", Nested::LeftOut)) };
    let field = schema["properties"].get(part).ok_or_else(|| no_part(part))?;
    Ok(fields::table(field, part, Nested::Included))
}

/// The fields in `spec` of each of vipgate's kinds, or of one.
fn manifests(part: Option<&str>) -> Result<String, CommandError> {
    let mut out = Vec::new();
    for kind in KINDS.into_iter().filter(|kind| part.is_none_or(|part| part == kind.as_str())) {
        let schema = schema_of(kind).unwrap_or_default();
        let table = fields::table(&schema["properties"]["spec"], "spec", Nested::Included);
        out.push(if part.is_some() { table } else { format!("### {}\n\n{table}", kind.as_str()) });
    }
    match part {
        Some(part) if out.is_empty() => Err(no_part(part)),
        _ => Ok(out.join("\n")),
    }
}

/// Every code with its explanation and example.
fn diagnostics() -> String {
    let mut out = Vec::new();
    for (area, name) in AREAS {
        out.push(format!("## {name}\n"));
        for code in Code::ALL.iter().filter(|code| code.number() / 100 == area) {
            let mut text = format!("### {code}: {}\n\n{}\n", code.title(), code.explanation());
            if let Some(Example { document, wrong, right }) = code.example() {
                let _ = write!(text, "\n```yaml\n# wrong, in {document}\n{wrong}\n# right\n{right}\n```\n");
            }
            out.push(text);
        }
    }
    out.join("\n")
}

/// The table of limits.
fn limits() -> String {
    let mut out = "| limit | maximum | of | counted |\n|---|---|---|---|\n".to_owned();
    for Limit { what, max, scope, fields } in &limits::ALL {
        let scope = match scope {
            Scope::Object => "one object",
            Scope::Whole => "all objects",
            Scope::Platform => "all objects, of the platform team",
        };
        let _ = writeln!(out, "| {what} | {max} | {scope} | {fields} |");
    }
    out
}

/// A document with all its generated sections renewed.
pub(super) fn rewrite(text: &str) -> Result<String, CommandError> {
    let mut out = String::with_capacity(text.len());
    let mut lines = text.split_inclusive('\n');
    while let Some(line) = lines.next() {
        out.push_str(line);
        let Some(marker) = line.strip_prefix(START) else { continue };
        let invalid =
            || CommandError::runtime(format!("`{}` is not the marker of a generated section", line.trim_end()));
        let words = marker.trim_end().strip_suffix(" -->").ok_or_else(invalid)?;
        let (name, part) = words.split_once(' ').map_or((words, None), |(name, part)| (name, Some(part)));
        let reference = Reference::from_str(name, false).map_err(|_| invalid())?;
        let _ = write!(out, "\n{}\n", reference.render(part)?);
        let end = lines
            .find(|line| line.trim_end() == END)
            .ok_or_else(|| CommandError::runtime(format!("the generated section `{words}` has no end")))?;
        out.push_str(end);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn docs() -> Vec<(String, String)> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let pages = paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        pages.map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap())).collect()
    }

    #[test]
    fn generated_sections_of_the_documents_are_up_to_date() {
        for (path, text) in docs() {
            let expected = rewrite(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(text == expected, "{path} is out of date: `make docs-generated` rewrites it");
        }
    }

    #[test]
    fn every_field_kind_code_and_metric_is_in_the_documents() {
        let all: String = docs().into_iter().map(|(_, text)| text).collect();
        let schema = document(Published::GatewayYaml);
        let fields = schema["properties"].as_object().unwrap().iter();
        let objects = fields.filter(|(_, it)| !fields::table(it, "x", Nested::Included).is_empty());
        let parts = objects.map(|(name, _)| format!("config {name}"));
        let kinds = KINDS.map(|kind| format!("manifests {}", kind.as_str()));
        let whole = ["config", "policyd", "diagnostics", "metrics", "limits"].map(str::to_owned);
        for section in parts.chain(kinds).chain(whole) {
            assert!(all.contains(&format!("{START}{section} -->")), "no document has `{START}{section} -->`");
        }
    }

    #[test]
    fn only_marked_sections_are_rewritten() {
        let text = format!("a\n{START}config workers -->\nold\n{END}\nb");
        let new = rewrite(&text).unwrap();
        assert!(new.starts_with("a\n") && new.ends_with(&format!("\n{END}\nb")), "{new}");
        assert!(new.contains("| `workers.cores` |") && !new.contains("old"), "{new}");
        assert_eq!(rewrite(&new).unwrap(), new);
        assert_eq!(rewrite("a\nb\n").unwrap(), "a\nb\n");
        for (text, expected) in [
            (format!("{START}config workers -->\n"), "the generated section `config workers` has no end".to_owned()),
            (format!("{START}x -->\n{END}"), format!("`{START}x -->` is not the marker of a generated section")),
            (format!("{START}config x -->\n{END}"), "there is no part `x`".to_owned()),
            (format!("{START}policyd x -->\n{END}"), "there is no part `x`".to_owned()),
        ] {
            assert_eq!(rewrite(&text).unwrap_err().to_string(), expected);
        }
    }
}
