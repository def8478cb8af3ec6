//! Errors of commands: the message for the user, the error behind it, and the exit code.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Error of a command. Its text is one line: the context, then the text of its source, which includes the sources below
/// it where those say more.
#[derive(Debug)]
pub struct CommandError {
    kind: Kind,
    /// What failed, with ": " at its end; empty if the source says it.
    context: String,
    source: Box<dyn Error + Send + Sync>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usage,
    Runtime,
}

impl CommandError {
    /// Failure at run time: exit code 1.
    pub fn runtime(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: Kind::Runtime, context: String::new(), source: error.into() }
    }

    /// Wrong usage, configuration or manifest: exit code 2.
    pub fn usage(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: Kind::Usage, ..Self::runtime(error) }
    }

    /// Says before the text of the error what failed: a setting, a file, an action.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.context.insert_str(0, &format!("{context}: "));
        self
    }

    /// Its exit code.
    pub fn exit_code(&self) -> ExitCode {
        match self.kind {
            Kind::Usage => ExitCode::from(2),
            Kind::Runtime => ExitCode::from(1),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.context, self.source)
    }
}

impl Error for CommandError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_error_keeps_its_source_behind_its_text() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let error = CommandError::usage(denied).context("cannot create x").context("sessions.state");
        assert_eq!(error.to_string(), "sessions.state: cannot create x: permission denied");
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.map(io::Error::kind), Some(io::ErrorKind::PermissionDenied));
        assert_eq!(error.exit_code(), ExitCode::from(2));
        assert_eq!(CommandError::runtime("interrupted").to_string(), "interrupted");
    }
}
