//! `vipgate completions` and `vipgate man`: shell completions and manual pages, generated from the command definitions.

use std::path::Path;
use std::{fs, io};

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::Cli;
use crate::command_error::CommandError;
use crate::output;

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

/// The command definitions without hidden commands, which only vipgate itself runs.
fn visible_commands() -> Command {
    let all = Cli::command();
    let hidden: Vec<String> =
        all.get_subcommands().filter(|it| it.is_hide_set()).map(|it| it.get_name().to_owned()).collect();
    let mut shown = Command::new("vipgate").version(env!("CARGO_PKG_VERSION"));
    if let Some(about) = all.get_about() {
        shown = shown.about(about.clone());
    }
    for command in all.get_subcommands().filter(|it| !hidden.contains(&it.get_name().to_owned())) {
        shown = shown.subcommand(command.clone());
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_man_page_and_completions() {
        let dir = tempfile::tempdir().unwrap();
        clap_mangen::generate_to(visible_commands(), dir.path()).unwrap();
        let mut pages: Vec<String> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        pages.sort();
        for page in
            ["vipgate.1", "vipgate-gateway.1", "vipgate-trace.1", "vipgate-capture.1", "vipgate-sessions-flush.1"]
        {
            assert!(pages.iter().any(|name| name == page), "{page} of {pages:?}");
        }
        assert!(!pages.iter().any(|name| name.contains("withdraw")), "{pages:?}");
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut visible_commands(), "vipgate", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("explain") && !text.contains("withdraw"), "{shell}");
        }
    }
}
