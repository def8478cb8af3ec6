//! `vipgate check --explain CODE`: the meaning of a diagnostic's code, or the list of all codes.

use std::fmt::Write;

use vipgate_policy::diagnostic::{AREAS, Code, Example};
use vipgate_policy::yaml::closest_match;

/// Line length of explanations.
const WIDTH: usize = 80;

/// No code has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no code `{name}`{hint}; `vipgate check --explain` lists all codes")]
pub struct UnknownCode {
    name: String,
    hint: String,
}

/// The explanation of a code such as `VG0301`, or for `list` the list of all codes.
///
/// # Errors
/// If there is no such code; the error suggests a similar one.
pub fn explain(name: &str) -> Result<String, UnknownCode> {
    if name.eq_ignore_ascii_case("list") {
        return Ok(list());
    }
    let code = Code::parse(name).ok_or_else(|| {
        let hint = similar(name).map(|code| format!(", did you mean {code}?")).unwrap_or_default();
        UnknownCode { name: name.to_owned(), hint }
    })?;
    Ok(explanation(code))
}

/// All codes with their titles, by area.
pub fn list() -> String {
    let mut text = String::new();
    for (i, (area, name)) in AREAS.iter().enumerate() {
        let _ = writeln!(text, "{}{name}", if i == 0 { "" } else { "\n" });
        for code in Code::ALL.iter().filter(|code| code.number() / 100 == *area) {
            let _ = writeln!(text, "  {code}  {}", code.title());
        }
    }
    text
}

fn explanation(code: Code) -> String {
    let mut text = format!("{code}: {}\n\n{}", code.title(), wrapped(code.explanation()));
    if let Some(Example { document, wrong, right }) = code.example() {
        let indented = |yaml: &str| format!("    {}\n", yaml.replace('\n', "\n    "));
        let _ = write!(text, "\nWrong ({document}):\n\n{}\nRight:\n\n{}", indented(wrong), indented(right));
    }
    text
}

/// The most similar code; `301` means `VG0301`.
fn similar(name: &str) -> Option<&'static Code> {
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
    let name = if is_number { format!("VG{name:0>4}") } else { name.to_owned() };
    let names: Vec<String> = Code::ALL.iter().map(ToString::to_string).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let found = closest_match(&name, &names)?;
    Code::ALL.iter().find(|code| code.to_string() == found)
}

/// Breaks a text into lines at spaces.
fn wrapped(text: &str) -> String {
    let (mut out, mut length) = (String::new(), 0);
    for word in text.split(' ') {
        let count = word.chars().count();
        let separator = match length {
            0 => "",
            _ if length + 1 + count > WIDTH => "\n",
            _ => " ",
        };
        length = if separator == " " { length + 1 + count } else { count };
        out.push_str(separator);
        out.push_str(word);
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_explained_with_an_example() {
        for name in ["VG0106", "vg0106", "0106"] {
            let text = explain(name).unwrap();
            assert!(text.starts_with("VG0106: Unknown field\n\nvipgate has no field with this name"), "{text}");
            assert!(text.contains("\nWrong (gateway.yaml):\n\n    workers: {core: [0, 1]}\n\nRight:\n\n"), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        }
    }

    #[test]
    fn all_codes_are_listed_by_area() {
        let text = list();
        assert_eq!(explain("List").as_ref(), Ok(&text));
        assert!(text.starts_with("YAML and single values\n  VG0101  Not valid YAML\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("  VG")).count(), Code::ALL.len());
    }

    #[test]
    fn an_unknown_code_is_an_error_with_a_suggestion() {
        for (name, expected) in [
            ("VG031", "there is no code `VG031`, did you mean VG0301?; `vipgate check --explain` lists all codes"),
            ("301", "there is no code `301`, did you mean VG0301?; `vipgate check --explain` lists all codes"),
            ("Diagnostics", "there is no code `Diagnostics`; `vipgate check --explain` lists all codes"),
        ] {
            assert_eq!(explain(name).unwrap_err().to_string(), expected);
        }
    }
}
