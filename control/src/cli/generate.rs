//! `vipgate completions` and `vipgate man`: shell completions and manual pages, generated from the command definitions;
//! and `vipgate generate`, for the reference sections of the documents.

mod fields;
mod reference;

use std::path::Path;
use std::{fs, io};

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::Cli;
use crate::command_error::CommandError;
use crate::output;

/// Rewrites the generated sections of the Markdown files in a directory.
pub(super) fn generate(directory: &Path) -> Result<(), CommandError> {
    for entry in fs::read_dir(directory).map_err(CommandError::runtime)? {
        let path = entry.map_err(CommandError::runtime)?.path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let failed = |error: io::Error| CommandError::runtime(error).context(path.display());
        let old = fs::read_to_string(&path).map_err(failed)?;
        let new = reference::rewrite(&old).map_err(|error| error.context(path.display()))?;
        if new != old {
            fs::write(&path, new).map_err(failed)?;
            output::print(&format!("{} rewritten\n", path.display()))?;
        }
    }
    Ok(())
}

/// Prints the completions for a shell.
pub(super) fn completions(shell: Shell) -> Result<(), CommandError> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut visible_commands(), "vipgate", &mut text);
    output::print(&String::from_utf8_lossy(&text))
}

/// Writes a manual page for each command.
pub(super) fn man(directory: &Path) -> Result<(), CommandError> {
    let failed = |error: io::Error| {
        CommandError::runtime(error).context(format_args!("cannot write manual pages to {}", directory.display()))
    };
    fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(visible_commands(), directory).map_err(failed)?;
    output::print(&format!("manual pages written to {}\n", directory.display()))
}

/// The command definitions without hidden commands, which only vipgate itself and its build run.
fn visible_commands() -> Command {
    let all = Cli::command();
    let mut shown = Command::new("vipgate").version(env!("CARGO_PKG_VERSION"));
    if let Some(about) = all.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(help) = all.get_after_help() {
        shown = shown.after_help(help.clone());
    }
    shown.subcommands(all.get_subcommands().filter(|it| !it.is_hide_set()).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_man_page_and_completions() {
        let dir = tempfile::tempdir().unwrap();
        man(dir.path()).unwrap();
        let mut pages: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        pages.sort();
        for page in
            ["vipgate.1", "vipgate-gateway.1", "vipgate-trace.1", "vipgate-capture.1", "vipgate-sessions-flush.1"]
        {
            assert!(pages.iter().any(|name| name == page), "{page} of {pages:?}");
        }
        assert!(!pages.iter().any(|name| name.contains("withdraw") || name.contains("generate")), "{pages:?}");
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut visible_commands(), "vipgate", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("explain") && !text.contains("withdraw"), "{shell}");
        }
    }
}
