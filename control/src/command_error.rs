//! Errors of commands: the message for the user and the exit code.

use std::fmt;
use std::process::ExitCode;

/// Error of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// Wrong usage, configuration or manifest: exit code 2.
    Usage(String),
    /// Failure at run time: exit code 1.
    Runtime(String),
}

impl CommandError {
    /// Failure at run time.
    pub fn runtime(error: impl fmt::Display) -> Self {
        Self::Runtime(error.to_string())
    }

    /// Wrong usage, configuration or manifest.
    pub fn usage(error: impl fmt::Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// Its exit code.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Runtime(_) => ExitCode::from(1),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::Runtime(text) => f.write_str(text),
        }
    }
}
