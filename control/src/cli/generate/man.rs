//! Manual pages, from the command definitions: the sections of `clap_mangen`, and EXAMPLES, FILES, EXIT STATUS and SEE
//! ALSO.

use std::io::{self, Write};

use clap::Command;
use clap_mangen::Man;

/// Begins the example in the help of a command.
const EXAMPLE: &str = "Example:\n";

/// Files of a default installation, with their meaning.
const FILES: [(&str, &str); 7] = [
    ("/etc/vipgate/gateway.yaml", "Configuration of the gateway, by the systemd unit vipgate.service."),
    ("/etc/vipgate/policyd.yaml", "Configuration of the policy server, by the systemd unit vipgate-policyd.service."),
    ("/etc/vipgate/node.yaml", "Configuration of the node agent, by the systemd unit vipgate-node.service."),
    ("/run/vipgate/gateway.sock", "Admin socket of the gateway."),
    ("/run/vipgate/node.sock", "Admin socket of the node agent."),
    ("/dev/shm/vipgate", "Sessions, which outlive the process."),
    ("/var/lib/vipgate/policy.cache", "The last policy of the policy server."),
];

/// Exit codes of all commands.
const EXIT_STATUS: [(&str, &str); 3] =
    [("0", "Done."), ("1", "Failed at run time."), ("2", "Wrong usage, configuration or manifest.")];

/// A manual page.
pub(super) struct Page {
    /// File name: `vipgate-sessions-flush.1`.
    pub(super) name: String,
    /// Text, in roff.
    pub(super) text: Vec<u8>,
}

/// The pages of a command and its visible subcommands.
///
/// # Errors
/// Never: writing into memory doesn't fail.
pub(super) fn pages(command: Command) -> io::Result<Vec<Page>> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    add_pages(&command, None, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, parent: Option<&str>, pages: &mut Vec<Page>) -> io::Result<()> {
    let subcommands: Vec<&Command> = command.get_subcommands().filter(|it| !it.is_hide_set()).collect();
    let links: Vec<&str> = parent.into_iter().chain(subcommands.iter().map(|it| page_name(it))).collect();
    pages.push(Page { name: format!("{}.1", page_name(command)), text: page(command, parent.is_none(), &links)? });
    for subcommand in subcommands {
        add_pages(subcommand, Some(page_name(command)), pages)?;
    }
    Ok(())
}

/// `vipgate-sessions-flush`.
fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &Command, is_main: bool, links: &[&str]) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone());
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (notes, examples) = help.split_once(EXAMPLE).unwrap_or((&help, ""));
    if !notes.trim().is_empty() {
        section(&mut out, "NOTES", &[verbatim(notes)])?;
    }
    man.render_options_section(&mut out)?;
    if command.get_subcommands().any(|it| !it.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    section(&mut out, "EXAMPLES", &[verbatim(examples)])?;
    if is_main {
        section(&mut out, "FILES", &FILES.map(definition))?;
        section(&mut out, "EXIT STATUS", &EXIT_STATUS.map(definition))?;
        man.render_version_section(&mut out)?;
    }
    section(&mut out, "SEE ALSO", &[see_also(links)])?;
    Ok(out)
}

fn section(out: &mut Vec<u8>, title: &str, parts: &[String]) -> io::Result<()> {
    writeln!(out, ".SH \"{title}\"")?;
    parts.iter().try_for_each(|part| out.write_all(part.as_bytes()))
}

/// Lines as they are, without filling.
fn verbatim(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().lines().map(escaped).collect();
    format!(".nf\n{}\n.fi\n", lines.join("\n"))
}

fn definition((term, text): (&str, &str)) -> String {
    format!(".TP\n{}\n{}\n", escaped(term), escaped(text))
}

fn see_also(names: &[&str]) -> String {
    let links: Vec<String> = names.iter().map(|name| format!(".BR {} (1)", escaped(name))).collect();
    format!("{}\n", links.join(",\n"))
}

/// Escapes roff's special characters; a line that begins with a dot or quote would be a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::super::visible_commands;
    use super::*;

    #[test]
    fn every_page_has_its_sections() {
        let pages = pages(visible_commands()).unwrap();
        for Page { name, text } in &pages {
            let text = str::from_utf8(text).unwrap();
            let headings: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix(".SH ")).map(|it| it.trim_matches('"')).collect();
            for expected in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "SEE ALSO"] {
                assert!(headings.contains(&expected), "{name} has no {expected}: {headings:?}");
            }
            assert!(!headings.contains(&"EXTRA"), "{name}: {headings:?}");
            let is_main = name == "vipgate.1";
            assert_eq!(headings.contains(&"FILES") && headings.contains(&"EXIT STATUS"), is_main, "{name}");
            let example = text.split_once(".SH \"EXAMPLES\"\n.nf\n").unwrap().1;
            assert!(example.starts_with("  vipgate"), "{name}: {example}");
        }
        assert!(pages.iter().any(|page| page.name == "vipgate-sessions-flush.1"));
    }

    #[test]
    fn pages_refer_to_existing_pages() {
        let pages = pages(visible_commands()).unwrap();
        for Page { name, text } in &pages {
            let text = String::from_utf8_lossy(text).replace("\\-", "-");
            let links: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(".BR ")).collect();
            assert!(!links.is_empty(), "{name}");
            for link in links {
                let file = link.trim_end_matches(',').replace(" (", ".").replace(')', "");
                assert!(pages.iter().any(|page| page.name == file), "{name} refers to {file}");
            }
        }
    }

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(escaped("a \\ b"), "a \\e b");
        assert_eq!(escaped(".x --y"), "\\&.x \\-\\-y");
    }
}
